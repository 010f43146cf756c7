"""Rows of schedules with copies, with stages on all ranks, and of steps that repeat."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeloom.ir.flow import dag
from pipeloom.ir.stages import chain
from pipeloom.ir.weights import Updates
from pipeloom.lowering.steady import SteadyRows
from pipeloom.schedules.language.placements import spread
from pipeloom.schedules.registry import build, build_steady


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("table", [((0, 1), 0, 1), (0, 1, (0, 1)), (0, (0, 1), 1)], ids=str)
def test_all_ranks_of_a_stage_keep_one_clock(name: str, table: tuple[int | tuple[int, ...], ...]) -> None:
    made = build(name, *spread(chain(3), table), 4)
    assert [len(row) for row in made.rows] == [16, 16]


@pytest.mark.parametrize("name", ["1f1b:offload=1", "zb_h1:offload=1"])
def test_rows_of_steps_have_every_copy_once(name):
    towers = dag(5, [(0, 1), (2, 3), (1, 4), (3, 4)])
    updates = Updates(policy="2bw", every=4)
    body = build_steady(name, towers, (0, 1, 2, 3, 4), updates)
    rows = SteadyRows(step=body, stages=towers, updates=updates)
    batches = 9
    fed = [rows.row(batch, batch) for batch in range(batches)] + [rows.drain(batches - 1, batches)]
    found = Counter(step.kind for row in fed for step in row.program.rows[0] if hasattr(step, "kind"))
    assert found["OFFLOAD"] == found["RELOAD"] > 4 * (batches - 2)
    assert found["F"] == 4 * batches == found["B"] + found["I"]
