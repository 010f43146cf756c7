"""A timeline to look at, and the page that shows it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drawings import MiB, computing

from pipeloom.ir.timeline import Event, MemoryCurve, Timeline
from pipeloom.viewer.html import write_report


@pytest.fixture
def page_of(tmp_path: Path) -> Callable[..., str]:
    """The text of a report of what is given."""

    def page(**what: Any) -> str:
        write_report(tmp_path / "report.html", **({"title": "x"} | what))
        return (tmp_path / "report.html").read_text()

    return page


@pytest.fixture
def two_ranks() -> Timeline:
    """Rank 0: F F B B; rank 1: F B F B; forward 1 s, backward 2 s, then a step of 0.5 s on rank 0."""
    computed = computing(
        (0, "0F0", 0, 1),
        (0, "0F1", 1, 2),
        (0, "0B0", 4, 6),
        (0, "0B1", 7, 9),
        (0, "0STEP", 9, 9.5),
        (1, "1F0", 1, 2),
        (1, "1B0", 2, 4),
        (1, "1F1", 4, 5),
        (1, "1B1", 5, 7),
    )
    wait = Event(rank=0, stream="recv", action="0RECV_B0<1", start_s=2, end_s=4)
    return replace(
        computed,
        events=(*computed.events, wait),
        memory=(MemoryCurve(rank=0, times_s=(0.0, 1.0, 9.0), sizes=(10 * MiB, 30 * MiB, 10 * MiB)),),
        peaks=({"parameters": 10 * MiB, "residuals": 20 * MiB}, {"parameters": 10 * MiB}),
    )
