"""Ranks without stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.checks.schedules import check
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.schedules import registry
from pipeloom.schedules.formats.csv import parse_schedule


def hand(*rows: str, placement: tuple[int, ...] = (0, 1)) -> Schedule:
    return Schedule(name="hand", microbatches=1, placement=placement, rows=parse_rows(rows))


def refused(made: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(made, chain(made.stages))
    return str(caught.value)


def test_ranks_without_a_stage_are_named() -> None:
    assert refused(hand("0F0 1F0 1B0 0B0", "", placement=(0, 0))) == (
        "rank 1 has no stage: the stages are on rank 0\nhint: place a stage there, or drop the row"
    )
    assert refused(hand("", "0F0 0B0", "", "1F0 1B0", "", placement=(1, 3))) == (
        "ranks 0, 2, 4 have no stage: the stages are on ranks 1, 3\n"
        "hint: place stages there, or drop the rows"
    )
    many = hand("0F0 0B0", *[""] * 20, placement=(0,))
    assert refused(many).startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more have no stage")


def test_an_empty_line_of_a_file_is_a_rank_without_a_stage() -> None:
    assert refused(parse_schedule("0F0,0B0\n\n1F0,1B0\n")).startswith("rank 1 has no stage")


def test_an_action_on_the_rank_of_a_replica_is_sent_home() -> None:
    stages, placement = registry.default_placement("chimera", 2)
    made = registry.build("chimera", stages, placement, 1)
    assert placement == (0, 1, 1, 0)
    first, second = made.rows
    moved = replace(made, rows=(tuple(a for a in first if str(a) != "0F0"), (*second, first[0])))
    with pytest.raises(ScheduleError) as caught:
        check(moved, stages)
    assert str(caught.value) == (
        "rank 1 runs 0F0, but stage 0 is placed on rank 0\nhint: move 0F0 to the row of rank 0"
    )
