"""Pairs are marked as such in every drawing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drawings import computing, printed

from pipeloom.viewer.chrome import chrome_trace
from pipeloom.viewer.picture import TICKS, pictures
from pipeloom.viewer.terminal import gantt

TIMELINE = computing(
    (0, "0F0", 0, 1),
    (0, "0F1", 1, 2),
    (0, "0B0", 2, 4),
    (0, "0B1", 4, 6),
    (1, "1F0", 1, 2),
    (1, "1B0", 2, 4),
    (1, "1F1", 4, 5),
    (1, "1B1", 5, 7),
    pairs=(("0F1", "0B0"), ("1F1", "1B1")),
)


def test_in_the_terminal_they_are_joined_and_underlined() -> None:
    """Where the first has no room the mark goes to the second."""
    lines = printed(gantt(TIMELINE, width=28))
    assert lines[:2] == ["rank 0 F0──F1─&B0──────B1──────····", "rank 1 ····F0──B0──────F1─&B1──────"]
    assert any("F&B a pair, run as one unit" in line for line in lines)
    assert "\x1b[4;" in printed(gantt(TIMELINE, width=28), colour=True)[0]
    narrow = [printed(gantt(TIMELINE, width=width))[0] for width in (14, 7)]
    assert narrow == ["rank 0 F0F1&B0─B1──··", "rank 0 FFB0B1·"]


def test_on_the_page_they_are_framed(page_of: Callable[..., str]) -> None:
    (page,) = pictures([TIMELINE])
    found = [(rank, start * 7 / TICKS, end * 7 / TICKS) for rank, start, end in page["pairs"]]
    assert found == [(0, pytest.approx(1), pytest.approx(4)), (1, pytest.approx(4), pytest.approx(7))]
    assert page["partner"]["0B0"] == "0F1" and page["partner"]["0F1"] == "0B0"
    assert "pair: two actions that run as one unit" in page_of(predicted=TIMELINE)


def test_in_a_trace_a_range_lies_around_both() -> None:
    ranges = [e for e in chrome_trace([TIMELINE])["traceEvents"] if e.get("cat") == "pair"]
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in ranges] == [
        ("PP:0F1&0B0", 0, 1e6, 3e6),
        ("PP:1F1&1B1", 1, 4e6, 3e6),
    ]


def test_a_step_that_runs_a_program_twice_has_each_pair_twice() -> None:
    twice = computing(
        (0, "0F1", 0, 1), (0, "0B0", 1, 2), (0, "0F1", 2, 3), (0, "0B0", 3, 4), pairs=(("0F1", "0B0"),)
    )
    assert [(a.start_s, b.end_s) for a, b in twice.paired] == [(0, 2), (2, 4)]
