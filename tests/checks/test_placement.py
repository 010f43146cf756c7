"""Ranks without stages, and evictions that do not come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom import schedules
from pipeloom.checks import check
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.schedules.formats import parse_schedule


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
    stages, placement = schedules.default_placement("chimera", 2)
    made = schedules.build("chimera", stages, placement, 1)
    assert placement == (0, 1, 1, 0)
    first, second = made.rows
    moved = replace(made, rows=(tuple(a for a in first if str(a) != "0F0"), (*second, first[0])))
    with pytest.raises(ScheduleError) as caught:
        check(moved, stages)
    assert str(caught.value) == (
        "rank 1 runs 0F0, but stage 0 is placed on rank 0\nhint: move 0F0 to the row of rank 0"
    )


EVICTED = "0F0 0EVICT0 0FETCH0 0B0"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "0F0 0EVICT0 0B0 0FETCH0",
            "rank 0 runs 0B0, but its residuals are on rank 1 since 0EVICT0\n"
            "hint: put 0FETCH0 between them, or drop 0EVICT0",
        ),
        (
            "0F0 0I0 0EVICT0 0FETCH0 0W0",
            "rank 0 runs 0EVICT0 after 0I0, which has used its residuals\n"
            "hint: put 0EVICT0 between 0F0 and 0I0, or drop it",
        ),
        (
            "0F0 0FETCH0 0EVICT0 0B0",
            "rank 0 runs 0FETCH0, but nothing of it was evicted\n"
            "hint: put 0EVICT0 in front of it, or drop it",
        ),
        ("0F0 0EVICT0", "rank 0 runs 0EVICT0 and never 0FETCH0\nhint: add 0FETCH0 behind it"),
        (
            "0EVICT0 0F0 0FETCH0 0B0",
            "rank 0 runs 0EVICT0 before 0F0, which it needs\nhint: move 0F0 in front of 0EVICT0",
        ),
    ],
)
def test_evictions_come_back_before_they_are_used(row: str, message: str) -> None:
    schedules.build("bpipe", chain(2), (0, 1), 1)  # makes the kinds known
    check(hand(EVICTED, "1F0 1B0"), chain(2))
    second = "1F0" if "B0" not in row and "W0" not in row else "1F0 1B0"
    assert refused(hand(row, second)) == message


def test_a_rank_that_is_its_own_partner_evicts_nothing() -> None:
    schedules.build("bpipe", chain(2), (0, 1), 1)
    assert refused(hand(EVICTED, placement=(0,))) == (
        "rank 0 runs 0EVICT0, but it is its own partner\nhint: drop 0EVICT0 and its FETCH"
    )
