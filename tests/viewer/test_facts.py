from dataclasses import replace

import pytest

from pipeloom.ir.timeline import MemoryCurve, Timeline
from pipeloom.viewer.report_facts import (
    Comparison,
    StageRow,
    facts,
    memory_kinds,
    peak_of,
    stage_comparisons,
    stage_seconds,
)

MiB = 1024**2


def test_errors_are_shares_of_the_measured(two_ranks: Timeline) -> None:
    slower = replace(
        two_ranks,
        source="measured",
        events=tuple(replace(e, start_s=e.start_s * 2, end_s=e.end_s * 2) for e in two_ranks.events),
        peaks=tuple({kind: size * 3 for kind, size in peak.items()} for peak in two_ranks.peaks),
    )
    known = facts(two_ranks, slower)
    assert (known.step.predicted, known.step.measured, known.step.error) == (9.5, 19.0, -0.5)
    assert known.bubble.error == pytest.approx(0.0)
    first, second = known.peaks
    assert (first.predicted, first.measured) == (30 * MiB, 90 * MiB)
    assert first.error == pytest.approx(-2 / 3)
    assert second.error == pytest.approx(-2 / 3)
    assert known.worst_peak == first


def test_a_peak_comes_from_the_curve_else_from_its_kinds(two_ranks: Timeline) -> None:
    peaks = facts(two_ranks, None).peaks
    assert [p.predicted for p in peaks] == [30 * MiB, 10 * MiB]
    assert [p.measured for p in peaks] == [None, None]
    assert [p.error for p in peaks] == [None, None]
    fullest = facts(two_ranks, None).worst_peak
    assert fullest is not None and fullest.name == "rank 0"


def test_without_any_timeline_there_is_nothing_to_tell() -> None:
    known = facts(None, None)
    assert (known.step.predicted, known.peaks, known.worst_peak) == (None, (), None)
    assert Comparison(name="x", predicted=1.0, measured=0.0).error is None


def test_stage_times_are_means_per_microbatch(two_ranks: Timeline) -> None:
    assert stage_seconds(two_ranks, 0) == (1.0, 2.0)
    assert stage_seconds(two_ranks, 7) == (None, None)
    assert stage_seconds(None, 0) == (None, None)
    row = StageRow(stage=1, rank=1, ops=3, parameters=10)
    forward, backward = stage_comparisons(row, two_ranks, None)
    assert (forward.predicted, backward.predicted, backward.measured) == (1.0, 2.0, None)


def test_a_split_backward_counts_both_halves(two_ranks: Timeline) -> None:
    def split(action: str) -> str:
        return action.replace("B0", "I0").replace("B1", "W0")

    halves = replace(two_ranks, events=tuple(replace(e, action=split(e.action)) for e in two_ranks.events))
    assert stage_seconds(halves, 1) == (1.0, 4.0)


def test_memory_kinds_stand_in_the_plans_order(two_ranks: Timeline) -> None:
    odd = replace(two_ranks, peaks=({"cache": 1, "residuals": 2, "gradients": 0, "parameters": 3},))
    assert memory_kinds([odd]) == ("parameters", "residuals", "cache")


def test_the_peak_of_a_rank_is_what_its_kinds_add_up_to(two_ranks: Timeline) -> None:
    """A measured step that holds less than an earlier one had a smaller peak than the sum of its row."""
    low = MemoryCurve(rank=0, tier="device", times_s=(0.0,), sizes=(29 * MiB,))
    measured = replace(two_ranks, source="measured", memory=(low,))
    assert [p.measured for p in facts(None, measured).peaks] == [30 * MiB, 10 * MiB]
    assert peak_of(replace(measured, peaks=()), 0) == 29 * MiB
