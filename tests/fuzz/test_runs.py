"""What the checks accept runs: edited schedules and programs train to the gradients of one process.

An edit is kept where the check passes, so that many edits in a row stay valid. A rank that waits for too
long raises an error that fails the test, so nothing hangs.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from edits import ADDED, EDITS, OFTEN, Case, edited_rows, with_operations, with_pairs
from every_schedule import SYNCHRONOUS, gpt_job, plan_of
from hypothesis import HealthCheck, event, given, strategies as st
from programs import cuts, job_of, steps
from runs import Numbers, assert_same, capture_of, pipelined, plain, plan_for, threads
from trials import examples

from pipeloom import Job, Options, Pipeline
from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.errors import PeerError, ScheduleError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.operation import declare
from pipeloom.ir.plan import Plan
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph
from pipeloom.lowering.passes import lower
from pipeloom.runtime.operations import OperationContext

SOME = examples(3, 80, suppress_health_check=[HealthCheck.data_too_large])
TOLERANCE = 1e-11
COUNT = 4
SWAP = next(operation for operation in ADDED if operation.meets is not None)
WALKS = st.lists(st.sampled_from([*OFTEN, *OFTEN, "rename", "split", "rotate"]), min_size=1, max_size=25)


def walked(draw: st.DrawFn, rows: Any, rule: Callable[[Any], object]) -> Any:
    """Rows after some edits that each left them valid."""
    kept = 0
    for name in draw(WALKS):
        found = edited_rows(draw, rows, [name])
        with suppress(ScheduleError):
            rule(found)
            rows, kept = found, kept + (found != rows)
    event(f"{min(kept, 8)} edits or more")
    return rows


def stages_of(job: Job, plan: Plan) -> StageGraph:
    return plan.replicated(plan.stage_graph(capture_of(job, plan.microbatch_size).graph))


def edited_plan(draw: st.DrawFn, job: Job, plan: Plan) -> Plan:
    made, stages = plan.as_schedule, stages_of(job, plan)
    rows = walked(draw, made.rows, lambda rows: check(replace(made, rows=rows), stages))
    return replace(plan, schedule_rows=tuple(str(replace(made, rows=rows)).splitlines()))


JOB = gpt_job()


@cache
def plain_numbers() -> Numbers:
    return plain(JOB, [JOB.batch(0, COUNT)], COUNT)


def trains_as_one_process(plan: Plan) -> None:
    assert_same(pipelined(JOB, plan, [JOB.batch(0, COUNT)]), plain_numbers(), tolerance=TOLERANCE)


SWAPPED: list[float] = []
"""What ranks got where stages 0 and 1 meet; before the first step calls are rehearsed, each alone."""


def swap(context: OperationContext) -> None:
    mine = torch.full((1,), float(context.stage + 1))
    context.all_reduce(mine)
    SWAPPED.append(float(mine))


def prove_schedule(data: st.DataObject) -> None:
    """Any schedule, perhaps with operations and pairs, edited while it stays valid."""
    plan = plan_of(JOB, data.draw(st.sampled_from(SYNCHRONOUS)), 2, microbatches=COUNT)
    made, stages = plan.as_schedule, stages_of(JOB, plan)
    added = data.draw(st.sampled_from([with_operations, with_pairs, None]))
    if added is not None:
        made = added(data.draw, Case(stages, made)).schedule
        plan = replace(plan, schedule_rows=tuple(str(made).splitlines()))
    plan = edited_plan(data.draw, JOB, plan)
    SWAPPED.clear()
    declare(replace(SWAP, handler=swap))
    trains_as_one_process(plan)
    meetings = sum(a.kind == SWAP.kind for row in plan.as_schedule.rows for a in row)
    assert SWAPPED.count(3.0) == meetings


def prove_program(data: st.DataObject) -> None:
    """The program itself is edited: transfers, reductions and optimizer steps too."""
    plan = plan_of(JOB, data.draw(st.sampled_from(SYNCHRONOUS)), 2, microbatches=COUNT)
    stages = stages_of(JOB, plan)
    program = lower(plan.as_schedule, stages)
    rows = walked(data.draw, program.rows, lambda rows: check_program(replace(program, rows=rows), stages))

    def ours(schedule: Schedule, graph: StageGraph, *, policy: MemoryPolicy, **updates: Any) -> Any:
        assert policy == MemoryPolicy() and updates == {"updates": None, "clips": False}
        return replace(program, rows=rows)

    with patch("pipeloom.pipeline.lower", ours):
        trains_as_one_process(plan)


def prove_dag(data: st.DataObject) -> None:
    """A random model, cut into a DAG of stages."""
    job = job_of(data.draw(steps()))
    captured = capture_of(job)
    cut = data.draw(cuts(captured.graph))
    count = data.draw(st.integers(1, 3), label="micro-batches")
    plan = plan_for(captured, cut.stage_of, microbatches=count, schedule="gpipe", placement=cut.placement)
    batches = [job.batch(seed, 2 * count) for seed in range(2)]
    try:
        found = pipelined(job, edited_plan(data.draw, job, plan), batches)
    except ScheduleError as error:  # running means depend on the order of the forwards
        assert re.search(r"runs \d+F\d+ after \d+F\d+, but stage \d+ updates .* in each$", error.message)
        return
    assert_same(found, plain(job, batches, count), tolerance=TOLERANCE)


@pytest.mark.parametrize(
    "prove", [prove_schedule, prove_program, pytest.param(prove_dag, marks=pytest.mark.slow)]
)
@SOME
@given(st.data())
def test_edits_train_as_one_process(prove: Callable[[st.DataObject], None], data: st.DataObject) -> None:
    prove(data)


@SOME
@given(st.data())
def test_what_is_refused_is_refused_on_every_rank_before_the_first_step(data: st.DataObject) -> None:
    plan = plan_of(JOB, data.draw(st.sampled_from(["1f1b", "zb_h1", "zb_v"])), 2, microbatches=COUNT)
    made, stages = plan.as_schedule, stages_of(JOB, plan)
    names = data.draw(st.lists(st.sampled_from(sorted(EDITS)), min_size=1, max_size=3))
    edited = replace(made, rows=edited_rows(data.draw, made.rows, names))
    try:
        check(edited, stages)
        return
    except ScheduleError as error:
        refused = str(error)
    broken = replace(plan, schedule_rows=tuple(str(edited).split("\n")))

    def start(rank: int, channel: Any) -> str:
        with pytest.raises((ScheduleError, PeerError)) as caught:
            Pipeline(JOB, broken, options=Options(), channel=channel)
        return str(caught.value)

    said = threads(2, start)
    assert refused in said  # the other rank may hear of it first
    assert all(refused.splitlines()[0] in text for text in said)
