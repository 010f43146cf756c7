"""pipeoffload: the fastest of many schedules that fits, with and without offloading."""

from dataclasses import replace
from functools import cache, partial

import pytest
from joint_cases import with_memory
from random_stages import random_model

from pipeloom.ir.errors import InfeasibleError, PlanError, ScheduleError
from pipeloom.ir.plan import Plan
from pipeloom.planner.pipeoffload_schedules import pipeoffload_schedules
from pipeloom.planner.planners import make_plan
from pipeloom.planner.request import PlanOptions

RANKS, MICROBATCHES = 2, 4

LIMITED = ("1f1b:limit=1.5", *(f"po:v={v},limit={share * (v + 1)}" for v in (2, 4) for share in (0.75, 0.5)))
"""The same limit for all ranks, which the planner does not try: what the caps leave is to be as good."""


@pytest.fixture(autouse=True)
def small_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random models have no tensor of over 40 elements."""
    monkeypatch.setattr("pipeloom.planner.stage_cost.stage_estimate.SMALL_RESIDUAL", 0)


def plans(seed: int, share: float | None, **host: float):
    """schedule, strategy, treatments -> plan, for a random chain of ops; share: the cap, as a share of what
    1f1b holds without one."""
    model = random_model(seed, 12, host_bytes_per_s=40.0 * 4 ** (seed % 3), **host)

    def plan(schedule, strategy: str, treatments=None, memory: int = 1 << 40, watch=None, **how) -> Plan:
        cluster = with_memory(replace(model.cluster, devices=model.cluster.devices[:RANKS]), memory)
        asked = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": schedule, "planner": strategy}
        options = PlanOptions(treatments=treatments, **asked, **how)
        return make_plan(model.graph, model.profile, cluster, options, explained=False, watch=watch)

    if share is None:
        return plan
    return partial(plan, memory=int(share * max(plan("1f1b", "exact", ()).peaks)))


def seconds(plan, *asked) -> float:
    """Of a plan's simulated step; inf if there is none."""
    try:
        return plan(*asked).predicted_step_s
    except (PlanError, ScheduleError):
        return float("inf")


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow) for n in range(8)])
def test_it_is_the_best_of_a_grid(seed: int) -> None:
    make = cache(plans(seed, (None, 1.0, 0.9, 0.8)[seed % 4]))
    names = (*pipeoffload_schedules(RANKS, 12), *LIMITED)
    ways = [(name, *how) for name in names for how in (("exact", ()), ("probe", ("recompute",)))]
    ways += [(name, "dawnpiper", None) for name in ("1f1b", "gis_h")]
    least = min(seconds(make, *way) for way in ways)

    if least == float("inf"):
        with pytest.raises(InfeasibleError):
            make(None, "pipeoffload")
        return
    found = make(None, "pipeoffload")
    assert found.schedule in names
    assert all(peak <= cap for peak, cap in zip(found.peaks, found.caps, strict=True))
    assert found.predicted_step_s <= least * (1 + 1e-9)


def test_a_schedule_with_copies_makes_nothing_again_where_only_offloading_is_allowed() -> None:
    plan = plans(3, None)
    either, alone = (plan("1f1b:offload=1", "exact", allowed) for allowed in (None, ("offload",)))
    assert any(stage.recomputed_bytes for stage in either.stages)
    assert not any(stage.recomputed_bytes for stage in alone.stages)
    leaving = [sum(stage.offloaded_bytes for stage in one.stages) for one in (alone, either)]
    assert leaving[0] > leaving[1]


def test_as_many_copies_as_the_caps_ask_for() -> None:
    def copied(plan: Plan) -> int:
        return sum(row.count("OFFLOAD") for row in plan.schedule_rows)

    with pytest.raises(InfeasibleError):
        plans(2, 0.8)("1f1b", "exact", ())
    tight, loose, free = (plans(2, share)("1f1b:fit=1", "exact", ("offload",)) for share in (0.8, 0.95, None))
    for plan in (tight, loose):
        assert all(peak <= cap for peak, cap in zip(plan.peaks, plan.caps, strict=True))
    assert copied(tight) > 0 == copied(free)
    with pytest.raises(PlanError, match="1f1b:fit=1 offloads"):
        plans(2, None)("1f1b:fit=1", "exact", ())
    assert copied(loose) <= copied(tight)


def test_a_host_that_is_too_small_is_refused_with_its_rank() -> None:
    assert any(stage.offloaded_bytes for stage in plans(3, None)("1f1b:offload=1", "exact").stages)
    with pytest.raises(InfeasibleError, match="node 0 offload .*: rank 0"):
        plans(3, None, host_memory=1)("1f1b:offload=1", "exact")


@pytest.mark.parametrize("name", ["zb_v", "po:v=2,offload=1"])
def test_only_the_schedules_that_are_named_are_planned_with(name: str) -> None:
    tried: set[str] = set()

    class Watch:
        def weighed(self, count: int) -> None: ...

        def trying(self, what: str, best: object, bound_s: float) -> None:
            tried.add(what.partition(": ")[2])

    plan = plans(2, None)(None, "pipeoffload", watch=Watch(), schedules=(name,))
    assert plan.schedule == name and tried == {name}
