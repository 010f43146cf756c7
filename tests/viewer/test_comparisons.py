"""Tables and figures of a step, and their texts in a terminal."""

from dataclasses import replace

import pytest
from drawings import MiB, printed
from rich.console import RenderableType

from pipeloom.ir.text import SizeUnit
from pipeloom.ir.timeline import MemoryCurve, Timeline
from pipeloom.viewer import comparisons
from pipeloom.viewer.comparisons import Comparison, StageRow, memory_table, peak_figures, step_figures
from pipeloom.viewer.table import Column, Table

ROWS = [
    StageRow(stage=0, rank=0, ops=12, parameters=1_250_000, contents="blocks.0 .. blocks.3"),
    StageRow(stage=1, rank=1, ops=9, parameters=70_000, contents="blocks.4 .. head"),
]


def text(thing: RenderableType, width: int = 100) -> str:
    return "\n".join(printed(thing, width))


def slower(timeline: Timeline) -> Timeline:
    """As if it had been measured: all takes longer, and three times the memory."""
    return replace(
        timeline,
        source="measured",
        events=tuple(replace(e, start_s=e.start_s * 2, end_s=e.end_s * 2) for e in timeline.events),
        peaks=tuple({kind: size * 3 for kind, size in peak.items()} for peak in timeline.peaks),
    )


def test_errors_are_shares_of_the_measured(two_ranks: Timeline) -> None:
    both = two_ranks, slower(two_ranks)
    step, bubble = step_figures(both)
    assert (step.predicted, step.measured, step.error, step.good) == (9.5, 19.0, -0.5, False)
    assert bubble.predicted == bubble.measured and bubble.error is None
    peaks = peak_figures(both)
    assert [(p.predicted, p.measured) for p in peaks.values()] == [(30 * MiB, 90 * MiB), (10 * MiB, 30 * MiB)]
    assert [p.error for p in peaks.values()] == [pytest.approx(-2 / 3)] * 2
    unknown = Comparison(name="x", predicted=99.0, measured=None)
    assert comparisons.worst_peak([unknown, step]) == [step] and comparisons.worst_peak([]) == []
    assert Comparison(name="x", predicted=1.0, measured=0.0).error is None


def test_without_a_measurement_the_fullest_rank_is_the_worst(two_ranks: Timeline) -> None:
    peaks = peak_figures((two_ranks, None))
    found = [(p.predicted, p.measured, p.error) for p in peaks.values()]
    assert found == [(30 * MiB, None, None), (10 * MiB, None, None)]
    assert comparisons.worst_peak(peaks.values()) == [peaks[0]]
    assert (step_figures((None, None)), peak_figures((None, None))) == ([], {})


def test_the_peak_of_a_rank_is_what_its_kinds_add_up_to_else_that_of_its_curve(two_ranks: Timeline) -> None:
    low = MemoryCurve(rank=0, tier="device", times_s=(0.0,), sizes=(29 * MiB,))
    measured = replace(two_ranks, source="measured", memory=(low,))
    assert [p.measured for p in peak_figures((None, measured)).values()] == [30 * MiB, 10 * MiB]
    assert comparisons.peak_of(replace(measured, peaks=()), 0) == 29 * MiB


def test_stage_times_are_means_and_a_split_backward_counts_both_halves(two_ranks: Timeline) -> None:
    assert (
        comparisons.stage_seconds(two_ranks)[0, "forward"] == 1.0
        and comparisons.stage_seconds(two_ranks)[0, "backward"] == 2.0
    )

    def split(action: str) -> str:
        return action.replace("B0", "I0").replace("B1", "W0")

    halves = replace(two_ranks, events=tuple(replace(e, action=split(e.action)) for e in two_ranks.events))
    assert comparisons.stage_seconds(halves)[1, "backward"] == 4.0


def test_tables_are_pictures_without_empty_columns(two_ranks: Timeline) -> None:
    middle = Comparison(name="middle step", predicted=9.0, measured=10.0)
    both = two_ranks, replace(two_ranks, source="measured", memory=())
    figures = [*step_figures(both, middle), *peak_figures(both).values()]
    assert (
        text(comparisons.summary_table(figures).to_rich())
        == """\
step
                     predicted  measured    error
─────────────────────────────────────────────────
middle step             9.00 s   10.00 s  -10.0 %
bubble                  34.2 %    34.2 %        –
peak memory, rank 0   30.0 MiB  30.0 MiB    0.0 %
peak memory, rank 1   10.0 MiB  10.0 MiB    0.0 %"""
    )
    assert (
        text(comparisons.stage_table(ROWS, (two_ranks, None)).to_rich())
        == """\
stages, ms per micro-batch
                                forward   backward
stage  rank  ops  parameters  simulated  simulated  contents
────────────────────────────────────────────────────────────────────────
    0     0   12      1.25 M    1000.00    2000.00  blocks.0 .. blocks.3
    1     1    9        70 k    1000.00    2000.00  blocks.4 .. head"""
    )
    assert (
        text(memory_table((two_ranks, slower(two_ranks)), ROWS, caps=[40 * MiB] * 2).to_rich())
        == """\
memory at each rank's peak, MiB
rank  stages             params  resid  peak    error   cap
───────────────────────────────────────────────────────────
   0       0  predicted    10.0   20.0  30.0           40.0
              measured     30.0   60.0  90.0  -66.7 %
   1       1  predicted    10.0      –  10.0           40.0
              measured     30.0      –  30.0  -66.7 %"""
    )


def test_memory_can_be_counted_in_another_unit_and_small_sizes_in_a_small_one(two_ranks: Timeline) -> None:
    table = memory_table((two_ranks, None), unit=SizeUnit(name="micro-batches", bytes=20 * MiB))
    assert table.title.endswith("micro-batches") and table.texts[0] == ["0", "simulated", "0.5", "1", "1.5"]
    tiny = replace(two_ranks, memory=(), peaks=({"parameters": 700}, {"parameters": 300}))
    assert [row[2] for row in memory_table((tiny, None)).texts] == ["700", "300"]
    odd = replace(two_ranks, peaks=({"cache": 1, "residuals": 2, "gradients": 0, "parameters": 3},))
    assert comparisons.memory_kinds([odd]) == ("parameters", "residuals", "cache")  # in the plan's order


def test_a_narrow_terminal_shows_every_figure_and_folds_words_which_are_no_markup(
    two_ranks: Timeline,
) -> None:
    both = two_ranks, replace(two_ranks, source="measured")
    shown = text(comparisons.stage_table(ROWS, both).to_rich(), width=76)
    assert max(map(len, shown.splitlines())) <= 76
    assert shown.count("1000.00") == 4 and shown.count("2000.00") == 4 and "…" not in shown
    assert "…" not in text(Table("", (Column("words", left=True),), (("many " * 9,),)).to_rich(), width=20)
    table = Table("", (Column("batch", left=True), Column("n")), (("x[4,8] [red]", 1),))
    assert "x[4,8] [red]" in text(table.to_rich())
