"""One registration adds a kind of action, a weight policy, a planner, a schedule or a tier, and it runs."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import nets
import pytest
import runs
from refusals import refused

from pipeloom import Plan, plan, simulate
from pipeloom.checks.weight_versions import weight_versions
from pipeloom.ir.action import Action, ActionKind, B, F, register_kind
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.stages import chain
from pipeloom.ir.timeline import Timeline
from pipeloom.ir.weight_policies import WEIGHT_POLICIES, Updates, WeightPolicy
from pipeloom.lowering.passes import lower
from pipeloom.planner.own_search import by_cuts
from pipeloom.planner.planners import PLANNERS
from pipeloom.planner.request import Planner
from pipeloom.planner.search.cut_search import Search
from pipeloom.planner.search.problem import Cuts
from pipeloom.planning import estimate
from pipeloom.runtime.file_tier import FileTier
from pipeloom.runtime.open_tier import TIERS
from pipeloom.runtime.operations import OperationContext
from pipeloom.schedules import formats, registry
from pipeloom.schedules.language.shape import Shape
from pipeloom.simulator.simulate import simulate as simulate_simulate

JOB = nets.job("skips")
STAGES, MICROBATCHES, ROWS = 2, 4, 2
DEVICE = Device(name="any", memory_bytes=1 << 30, flops_per_s={"float32": 1e12}, memory_bytes_per_s=1e11)
CLUSTER = Cluster(devices=(DEVICE,) * STAGES, within_node=Link(bandwidth_bytes_per_s=1e9))


@pytest.fixture(autouse=True)
def forget_registrations() -> Iterator[None]:
    with ExitStack() as stack:
        for table in (WEIGHT_POLICIES, PLANNERS, registry.FAMILIES, TIERS):
            stack.enter_context(patch.dict(table))
        yield


def planned(**how: Any) -> Plan:
    shape = {"ranks": STAGES, "microbatches": MICROBATCHES, "microbatch_size": ROWS, "cluster": CLUSTER}
    return plan(JOB, captured=runs.capture_of(JOB, ROWS), **shape | {"planner": "exact"} | how)


def simulated(made: Plan) -> Timeline:
    graph = runs.graph_of(JOB, ROWS)
    return simulate(made, graph, estimate(graph, CLUSTER), CLUSTER)


def assert_trains_like_plain_pytorch(made: Plan) -> None:
    batches = [JOB.batch(step, ROWS * MICROBATCHES) for step in range(2)]
    trained = runs.pipelined(JOB, made, batches)
    runs.assert_same(trained, runs.plain(JOB, batches, MICROBATCHES), tolerance=1e-5)


def test_a_kind_of_action() -> None:
    seen = set()

    def nap(context: OperationContext) -> None:
        seen.add((context.stage, context.microbatch))

    kind = register_kind("NAP", ActionKind(label="a short nap", after=F, handler=nap))
    plain = registry.build("1f1b", chain(STAGES), (0, 1), MICROBATCHES)
    rows = [[(a, replace(a, kind=kind)) if a.kind == F else (a,) for a in row] for row in plain.rows]
    napping = replace(plain, rows=tuple(tuple(itertools.chain(*row)) for row in rows))
    assert "CSV files have no action 0NAP0" in refused(ScheduleError, formats.schedule_text, napping)

    costs = tuple(replace(cost, other_s={kind: 0.5}) for cost in equal_costs(STAGES))
    program = lower(napping, chain(STAGES))
    timeline = simulate_simulate(program, chain(STAGES), costs, CLUSTER)
    naps = [event for event in timeline.events if event.action.startswith("0NAP")]
    assert [event.duration_s for event in naps] == [0.5] * MICROBATCHES
    assert {event.stream for event in naps} == {"compute"}

    even = runs.even_plan(JOB, STAGES, microbatches=MICROBATCHES)
    assert_trains_like_plain_pytorch(replace(even, schedule_rows=tuple(str(napping).splitlines())))
    assert seen == {(stage, b) for stage in range(STAGES) for b in range(MICROBATCHES)}


def test_a_schedule() -> None:
    def last_in_first_out(s: Shape) -> Any:
        order = range(s.microbatches)
        return [
            [*(Action(stage, F, b) for b in order), *(Action(stage, B, b) for b in order[::-1])]
            for stage in range(len(s.placement))
        ]

    registry.register("lifo", registry.Entry(rows=last_in_first_out))
    made = planned(schedule="lifo")
    assert made.schedule_rows[0] == "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0"
    assert simulated(made).step_s == made.predicted_step_s > 0
    assert_trains_like_plain_pytorch(made)


def test_a_planner() -> None:
    def first_cuts(search: Search) -> Cuts:
        points = search.model.cut_points.tolist()
        return (*points[: len(search.caps)], points[-1])

    PLANNERS["first-cuts"] = Planner(plan=by_cuts(first_cuts), granularity="op", about="", source="a test")
    made = planned(planner="first-cuts")
    assert made.planner == "first-cuts"
    assert len(made.stages[0].ops) < len(made.stages[1].ops)
    assert simulated(made).step_s == made.predicted_step_s
    assert_trains_like_plain_pytorch(made)


def test_a_weight_policy() -> None:
    WEIGHT_POLICIES["late"] = WeightPolicy(
        about="one update late",
        version=lambda microbatch, every, newest: max(newest - 1, 0),
        copies=lambda in_flight: 3,
    )
    stages = chain(STAGES)
    made = registry.build("1f1b", stages, (0, 1), MICROBATCHES)
    weight_versions(made, stages, Updates(policy="late"))
    few = Updates(policy="late", kept=1)
    assert "keeps only 1" in refused(ScheduleError, weight_versions, made, stages, few)
    flushed, plan_late = planned(), planned(weights="late")
    for one, other in zip(flushed.stages, plan_late.stages, strict=True):
        assert other.memory.parameters == 3 * one.memory.parameters
    assert plan_late.predicted_step_s < flushed.predicted_step_s
    assert simulated(plan_late).step_s == plan_late.predicted_step_s
    batches = [JOB.batch(step, ROWS * MICROBATCHES) for step in range(2)]
    trained, untrained = (runs.pipelined(JOB, plan_late, some) for some in (batches, []))
    worst, _ = runs.difference(trained.parameters, untrained.parameters)
    assert all(isfinite(loss) for loss in trained.losses) and worst > 0


def test_a_tier(tmp_path: Path) -> None:
    TIERS["cpu"] = opened = Mock(side_effect=lambda rank, directory, first: FileTier(tmp_path, rank))
    even = runs.even_plan(JOB, STAGES, microbatches=MICROBATCHES)
    memory = MemoryPolicy(stages=({}, dict.fromkeys(runs.residuals_of(JOB, even, 1), "offload")))
    assert_trains_like_plain_pytorch(replace(even, memory=memory))
    assert [call.args[0] for call in opened.call_args_list] == [1]
