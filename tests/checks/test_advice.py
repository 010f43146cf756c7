"""Advice in refusals of schedules, found by following it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.action import RECV_B, F, parse_action
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.operation import Operation, declare
from pipeloom.ir.schedule import Program, Schedule, parse_program, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules.language.placements import spread


def test_advice_against_a_deadlock_names_an_action_that_could_run() -> None:
    rows = ("3F0 0F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0")
    made = Schedule(name="", microbatches=1, placement=(0, 1, 1, 0), rows=parse_rows(rows))
    with pytest.raises(DeadlockError, match="rank 0 at 3F0 needs 2F0; rank 1 at 1F0 needs 0F0") as caught:
        check(made, chain(4))
    assert "rank 0 -> 1 -> 0: on rank 0 move 0F0 in front of 3F0" in str(caught.value.hint)


def test_a_shard_and_a_message_that_wait_for_each_other_are_refused() -> None:
    """Either alone is in order: rank 1 sends behind 3F1, which begins with 0F1, which rank 0 runs behind the
    receive. The simulator came to a stop with a failed assertion."""
    stages, placement = spread(chain(3), ((0, 1), 0, 1))
    rows = (
        "0F0 1RECV_F0<3 1F0 1SEND_F0>2 0F1 1RECV_F1<3 1F1 1SEND_F1>2",
        "3F0 3SEND_F0>1 3F1 3SEND_F1>1 2RECV_F0<1 2F0 2RECV_F1<1 2F1",
    )
    check_program(parse_program(2, placement, rows), stages)
    late = rows[1].replace("3SEND_F0>1 3F1", "3F1 3SEND_F0>1")
    with pytest.raises(DeadlockError, match="rank 0 at 1RECV_F0<3 needs 3SEND_F0>1; rank 1 at 3F1 needs"):
        check_program(parse_program(2, placement, (rows[0], late)), stages)


def test_what_a_rank_stands_at_is_not_to_be_moved_in_front_of_itself() -> None:
    """Rank 0 lacks 2F0, where rank 1 stands already: 1F1, which begins with it, lacks 0F1. It said "on rank 1
    move 2F0 in front of 2F0"."""
    rows = ("0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 2B1 1B0 1B1")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    pair = (parse_action("2F0"), parse_action("1F1"))
    schedule = Schedule(name="waits", microbatches=2, placement=(0, 1, 1, 0), rows=actions, pairs=(pair,))
    with pytest.raises(DeadlockError, match="rank 0 at 3F0 needs 2F0; rank 1 at 2F0 needs 0F1") as caught:
        check(schedule, chain(4))
    assert "on rank 1 let 2F0 begin alone" in str(caught.value.hint)
    check(replace(schedule, pairs=()), chain(4))


declare(
    Operation(letters="MEETBUG", meaning="both stages", after=F, meets=lambda stage: (1 - stage,), seconds=1)
)


def test_who_waits_for_gradients_in_front_of_a_meeting_is_told() -> None:
    rows = parse_rows(("0F0 0MEETBUG0 0B0", "1F0 1MEETBUG0 1B0"))
    program = lower(Schedule(name="", microbatches=1, placement=(0, 1), rows=rows), chain(2))
    check_program(program, chain(2))
    early = list(program.rows[0])
    receive = next(step for step in early if step.kind == RECV_B)
    early.remove(receive)
    early.insert(early.index(rows[0][1]), receive)
    moved = Program(microbatches=1, placement=(0, 1), rows=(tuple(early), program.rows[1]))
    needed = re.escape("rank 0 at 0RECV_B0<1 needs 1SEND_B0>0; rank 1 at 1MEETBUG0 needs 0RECV_B0<1")
    with pytest.raises(DeadlockError, match=needed):
        check_program(moved, chain(2))
