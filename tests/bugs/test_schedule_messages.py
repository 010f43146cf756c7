"""Advice in messages that did not help, found by following it (`tests/fuzz`)."""

from __future__ import annotations

import pytest

from pipeloom.ir.check import check
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import chain


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
