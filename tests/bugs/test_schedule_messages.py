"""Advice in messages that did not help, found by following it (`tests/fuzz`)."""

from __future__ import annotations

import pytest

from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.schedule import Schedule, parse_program, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.schedules.placements import spread


def test_advice_against_a_deadlock_names_an_action_that_could_run() -> None:
    """It said to move 2F0 in front of 1F0, which makes what 2F0 needs."""
    rows = ("3F0 0F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0")
    made = Schedule(name="", microbatches=1, placement=(0, 1, 1, 0), rows=parse_rows(rows))
    with pytest.raises(DeadlockError) as caught:
        check(made, chain(4))
    assert str(caught.value) == (
        "no rank can move: rank 0 at 3F0 needs 2F0; rank 1 at 1F0 needs 0F0\n"
        "hint: they wait in a circle, rank 0 -> 1 -> 0: on rank 0 move 0F0 in front of 3F0, "
        "or reorder the others"
    )


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
