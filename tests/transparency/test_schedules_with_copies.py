"""Schedules with copies to the host train as one process does, however slow the host is."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nets
import pytest
from deep import GELU
from hypothesis import Phase, given, settings, strategies as st
from programs import policies
from runs import assert_same, even_plan, pipelined, plain, residuals_of, treated_plan

from pipeloom import Options, Pipeline
from pipeloom.ir.action import COPYING, OFFLOAD
from pipeloom.ir.plan import Plan
from pipeloom.runtime.file_tier import FileTier
from pipeloom.runtime.launch import launch
from pipeloom.schedules import registry

ROWS = 64
JOB = nets.in_double(replace(GELU, name="deep"))


def planned(name: str, ranks: int, chunks: int, microbatches: int) -> Plan:
    """All residuals of every stage leave where the schedule says so."""
    _, placement = registry.default_placement(name, ranks, chunks)
    how = {"microbatches": microbatches, "microbatch_size": ROWS, "schedule": name, "placement": placement}
    return treated_plan(JOB, even_plan(JOB, len(placement), **how), "offload")


def thinned(plan: Plan, data: st.DataObject) -> Plan:
    """The plan without the copies of some micro-batches."""
    rows = [line.split() for line in plan.schedule_rows]
    away = map(str, offloads(plan))
    dropped = {word for word in away if data.draw(st.booleans(), label=f"without {word}")}
    gone = {word.replace("OFFLOAD", kind) for word in dropped for kind in COPYING}
    lines = tuple(" ".join(word for word in row if word not in gone) for row in rows)
    return replace(plan, schedule_rows=lines)


def offloads(plan: Plan) -> list[Any]:
    return [action for row in plan.as_schedule.rows for action in row if action.kind == OFFLOAD]


@pytest.mark.slow
@settings(max_examples=3, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_partial_rows_and_mixed_treatments_equal_one_process(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["po", "gis", "zb_v"]))
    ranks, chunks = data.draw(st.integers(2, 3)), data.draw(st.integers(2, 2 if name == "zb_v" else 3))
    offload, microbatches = data.draw(st.integers(1, chunks)), data.draw(st.sampled_from([4, 7]))
    plan = planned(f"{name}:offload={offload}", ranks, chunks, microbatches)
    residuals = [residuals_of(JOB, plan, stage) for stage in range(len(plan.stages))]
    plan = replace(thinned(plan, data), memory=data.draw(policies(residuals)))
    batches = [JOB.batch(seed, ROWS * microbatches) for seed in (1, 2)]
    found = pipelined(JOB, plan, batches)
    assert_same(found, plain(JOB, batches, microbatches), tolerance=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [("1f1b:offload=1", 3, 1), ("po_f", 2, 2), ("po_h", 3, 2), ("gpipe:limit=3", 2, 1)],
)
def test_all_of_it_equals_one_process(name: str, ranks: int, chunks: int) -> None:
    plan = planned(name, ranks, chunks, 6)
    assert offloads(plan)
    batches = [JOB.batch(seed, ROWS * 6) for seed in (1, 2)]
    assert_same(pipelined(JOB, plan, batches), plain(JOB, batches, 6), tolerance=1e-12)


def die_within(where: str, plan: Plan, folder: Path) -> None:
    """Train; rank 1 is killed in the middle of its third copy."""
    move, copies = getattr(FileTier, where), []

    def broken_off(tier: FileTier, copy: Any) -> None:
        copies.append(copy)
        if tier._rank == 1 and len(copies) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        move(tier, copy)

    setattr(FileTier, where, broken_off)
    with Pipeline(JOB, plan, options=Options(offload_dir=folder)) as pipeline:
        pipeline.step(JOB.batch(1, ROWS * 6))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["_write", "_read_back"])
def test_a_rank_killed_in_the_middle_of_a_copy_leaves_nothing(where: str, tmp_path: Path) -> None:
    plan = planned("po_f", 2, 2, 6)
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    assert launch(partial(die_within, where), 2, args=(plan, tmp_path)) != 0
    assert not list(tmp_path.iterdir())
    left = set(shared.iterdir()) - before if shared.is_dir() else set()
    assert not [path for path in left if "torch" in path.name or "pipeloom" in path.name]
