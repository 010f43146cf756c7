"""The text Gantt chart, and the report of a step."""

from dataclasses import replace

import pytest
from drawings import computing, printed

from pipeloom.ir.timeline import Timeline
from pipeloom.schedules.scenario import Scenario, simulate_schedule
from pipeloom.viewer.comparisons import StageRow
from pipeloom.viewer.table import Table
from pipeloom.viewer.terminal import console, gantt, report


def drawn(timeline: Timeline, *, colour: bool = False, columns_of: int = 120, **more: object) -> list[str]:
    return printed(gantt(timeline, **more), columns_of, colour=colour)  # type: ignore[arg-type]


def row(*actions: str) -> Timeline:
    """One rank that runs these for a second each."""
    return computing(*((0, action, i, i + 1) for i, action in enumerate(actions)))


SMALL, CROWDED = row("0F0", "2F0", "2B0", "0B0"), row(*(f"0F{i}" for i in range(100)))


def test_it_is_a_picture_of_the_step(two_ranks: Timeline) -> None:
    assert drawn(two_ranks, width=38) == [
        "rank 0 F0──F1──········B0──────····B1──────ST",
        "rank 1 ····F0──B0──────F1──B1──────··········",
        "       0                               9.50 s",
        " F  forward    B  backward    STEP  optimizer step   · idle",
    ]


@pytest.mark.parametrize(
    ("timeline", "width", "line"),
    [
        pytest.param(SMALL, 16, "0F0─2F0─2B0─0B0─", id="stages are named"),
        pytest.param(SMALL, 8, "F0f0b0B0", id="small letters of further stages"),
        pytest.param(CROWDED, 30, "F" * 30, id="more actions than columns"),
        pytest.param(Timeline(source="measured", ranks=1, events=()), 5, "·····", id="nothing is idle"),
        pytest.param(computing((0, "0F0", 0, 0), (0, "2F0", 0, 0)), 5, "·····", id="no time"),
    ],
)
def test_blocks_show_what_they_have_room_for(timeline: Timeline, width: int, line: str) -> None:
    assert drawn(timeline, width=width)[0] == f"rank 0 {line}"


def test_it_says_what_its_letters_leave_out() -> None:
    assert drawn(SMALL, width=8)[2].endswith("· idle    f  in a further stage of the rank")
    assert drawn(CROWDED, width=30)[-1].startswith("100 actions of a rank in 30 columns")
    # No number of bands has room for both.
    timeline = computing((0, "0F0", 0, 5e-324), (0, "0B0", 0, 1))
    assert drawn(timeline, width=6, most_lines=9)[0] == "rank 0 B0────"


def test_a_narrow_chart_keeps_the_letters_and_charts_of_one_span_have_one_scale(two_ranks: Timeline) -> None:
    assert drawn(two_ranks, width=19)[:2] == ["rank 0 F0F1····B0──··B1──S", "rank 1 ··F0B0──F1B1──·····"]
    assert drawn(two_ranks, width=38, span_s=19.0)[0] == "rank 0 F0F1····B0──··B1──S" + "·" * 19


def test_there_is_room_for_figures_beside_it(two_ranks: Timeline) -> None:
    beside = {"bubble": ["31 %", "37 %"], "peak": ["2", "1"]}
    lines = drawn(two_ranks, columns=60, columns_of=60, beside=beside)
    assert {len(line) for line in lines[:3]} == {60}
    assert lines[0].split() == ["bubble", "peak"] and lines[2].endswith("    37 %     1")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "interleaved_1f1b", "hanayo"])
@pytest.mark.parametrize("microbatches", [4, 48])
def test_arrays_are_drawn_as_events_are(schedule: str, microbatches: int) -> None:
    where = Scenario(ranks=4, microbatches=microbatches, transfer_s=0.1)
    arrays = simulate_schedule(schedule, where).timeline
    begun = drawn(arrays, width=90, most_lines=40)
    assert "_events" not in vars(arrays.events)  # of a large step they would fill memory
    assert begun == drawn(replace(arrays, events=tuple(arrays.events)), width=90, most_lines=40)


def test_a_report_prints_what_there_is(two_ranks: Timeline) -> None:
    rows = [StageRow(stage=0, rank=0, ops=1, parameters=1)]
    things = list(report(predicted=two_ranks, stages=rows, width=90))
    assert "simulated: 9.50 s, bubble 34.2 %" in str(things[0]) and "measured" not in str(things[0])
    titles = [thing.title for thing in things if isinstance(thing, Table)]
    assert titles == ["step", "stages, ms per micro-batch", "memory at each rank's peak, MiB"]


def test_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("runs/a[/b]: mine.py:zap:v=2")
    assert capsys.readouterr().out == "runs/a[/b]: mine.py:zap:v=2\n"
