"""Stages on several ranks: their shards are apart and alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.checks.schedules import check
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.schedules import registry
from pipeloom.schedules.placements import spread

WIDE, PLACEMENT = spread(chain(2), (0, (1, 2)))


def hand(*rows: str, placement: tuple[int, ...] = PLACEMENT) -> Schedule:
    return Schedule(name="hand", microbatches=1, placement=placement, rows=parse_rows(rows))


def refused(made: Schedule, stages: StageGraph = WIDE) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(made, stages)
    return str(caught.value)


def test_a_built_one_passes() -> None:
    assert PLACEMENT == (0, 1, 2)
    registry.build("1f1b", WIDE, PLACEMENT, 4)


def test_two_shards_on_one_rank_are_refused() -> None:
    made = hand("0F0 0B0", "1F0 2F0 1B0 2B0", placement=(0, 1, 1))
    assert refused(made) == (
        "rank 1 has the stages 1 and 2, which are one stage on several ranks\n"
        "hint: place them on different ranks, or keep one of them"
    )


def test_a_backward_that_only_one_shard_splits_is_refused() -> None:
    assert refused(hand("0F0 0B0", "1F0 1B0", "2F0 2I0 2W0")) == (
        "rank 1 runs 1B0, but rank 2, which has the same stage, runs 2I0 and 2W0\n"
        "hint: split the backward on all ranks of a stage, or on none"
    )
    check(hand("0F0 0B0", "1F0 1I0 1W0", "2F0 2I0 2W0"), WIDE)


def test_shards_in_another_order_wait_for_ever() -> None:
    made = registry.build("gpipe", WIDE, PLACEMENT, 2)
    rows = (*made.rows[:2], parse_rows(("2F1 2F0 2B0 2B1",))[0])
    with pytest.raises(DeadlockError, match="rank 1 at 1F0 needs 2F0; rank 2 at 2F1 needs 1F1"):
        check(replace(made, rows=rows), WIDE)
