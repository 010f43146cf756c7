"""Pairs are marked as such in every drawing."""

from __future__ import annotations

import pytest
from rich.console import Console

from pipeloom.ir.timeline import Event, Timeline
from pipeloom.viewer.chrome import chrome_trace
from pipeloom.viewer.html import write_report
from pipeloom.viewer.picture import TICKS, pictures
from pipeloom.viewer.terminal import gantt


def step(*at: tuple[int, str, float, float], pairs: tuple[tuple[str, str], ...]) -> Timeline:
    events = [Event(rank=r, stream="compute", action=a, start_s=s, end_s=e) for r, a, s, e in at]
    return Timeline(source="predicted", ranks=1 + max(r for r, *_ in at), events=tuple(events), pairs=pairs)


TIMELINE = step(
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


def drawn(timeline: Timeline, width: int, *, colour: bool = False) -> list[str]:
    console = Console(width=120, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as capture:
        console.print(gantt(timeline, width=width))
    return capture.get().splitlines()


def test_in_the_terminal_they_are_joined_and_underlined() -> None:
    lines = drawn(TIMELINE, 28)
    assert lines[:2] == ["rank 0 F0──F1─&B0──────B1──────····", "rank 1 ····F0──B0──────F1─&B1──────"]
    assert any("F&B a pair, run as one unit" in line for line in lines)
    assert "\x1b[4;" in drawn(TIMELINE, 28, colour=True)[0]


def test_where_the_first_has_no_room_the_mark_goes_to_the_second() -> None:
    assert drawn(TIMELINE, 14)[0] == "rank 0 F0F1&B0─B1──··"
    assert drawn(TIMELINE, 7)[0] == "rank 0 FFB0B1·"


def test_without_pairs_nothing_says_so() -> None:
    plain = Timeline(source="predicted", ranks=2, events=TIMELINE.events)
    assert not any("&" in line for line in drawn(plain, 28))
    assert pictures([plain])[0]["pairs"] == []


def test_on_the_page_they_are_framed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (page,) = pictures([TIMELINE])
    found = [(rank, start * 7 / TICKS, end * 7 / TICKS) for rank, start, end in page["pairs"]]
    assert found == [(0, pytest.approx(1), pytest.approx(4)), (1, pytest.approx(4), pytest.approx(7))]
    assert page["partner"]["0B0"] == "0F1" and page["partner"]["0F1"] == "0B0"
    write_report(tmp_path / "page.html", title="pairs", predicted=TIMELINE)
    assert "pair: two actions that run as one unit" in (tmp_path / "page.html").read_text()


def test_in_a_trace_a_range_lies_around_both() -> None:
    ranges = [e for e in chrome_trace([TIMELINE])["traceEvents"] if e.get("cat") == "pair"]
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in ranges] == [
        ("PP:0F1&0B0", 0, 1e6, 3e6),
        ("PP:1F1&1B1", 1, 4e6, 3e6),
    ]


def test_a_step_that_runs_a_program_twice_has_each_pair_twice() -> None:
    twice = step(
        (0, "0F1", 0, 1), (0, "0B0", 1, 2), (0, "0F1", 2, 3), (0, "0B0", 3, 4), pairs=(("0F1", "0B0"),)
    )
    assert [(a.start_s, b.end_s) for a, b in twice.paired] == [(0, 2), (2, 4)]
