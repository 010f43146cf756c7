"""Advice on orders in which a rank stands at one of a pair of actions that begin together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.checks.schedules import check
from pipeloom.ir.action import parse_action
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import chain


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
