"""A receive moved in front of an operation that meets others passed the checks; all ranks waited for ever."""

import re

import pytest

from pipeloom.checks.schedules import check_program
from pipeloom.ir.action import RECV_B, F, Transfer
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.operation import Operation, declare
from pipeloom.ir.schedule import Program, Schedule, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.lowering.passes import lower

MEET = declare(
    Operation(letters="MEETBUG", meaning="both stages", after=F, meets=lambda stage: (1 - stage,), seconds=1)
)


def test_who_waits_for_gradients_in_front_of_a_meeting_is_told() -> None:
    rows = parse_rows(("0F0 0MEETBUG0 0B0", "1F0 1MEETBUG0 1B0"))
    program = lower(Schedule(name="", microbatches=1, placement=(0, 1), rows=rows), chain(2))
    check_program(program, chain(2))
    early = list(program.rows[0])
    receive = next(step for step in early if isinstance(step, Transfer) and step.kind == RECV_B)
    early.remove(receive)
    early.insert(early.index(rows[0][1]), receive)
    moved = Program(microbatches=1, placement=(0, 1), rows=(tuple(early), program.rows[1]))
    needed = re.escape("rank 0 at 0RECV_B0<1 needs 1SEND_B0>0; rank 1 at 1MEETBUG0 needs 0RECV_B0<1")
    with pytest.raises(DeadlockError, match=needed):
        check_program(moved, chain(2))
