"""1f1b and gpipe with a stage on all ranks: these had clocks of their own, and waited for ever."""

from __future__ import annotations

import pytest

from pipeloom.ir.stages import chain
from pipeloom.schedules.placements import spread
from pipeloom.schedules.registry import build


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("table", [((0, 1), 0, 1), (0, 1, (0, 1)), (0, (0, 1), 1)], ids=str)
def test_all_ranks_of_a_stage_keep_one_clock(name: str, table: tuple[int | tuple[int, ...], ...]) -> None:
    made = build(name, *spread(chain(3), table), 4)
    assert [len(row) for row in made.rows] == [16, 16]
