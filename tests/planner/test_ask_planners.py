"""auto: several planners under the same caps, the fastest plan of all."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from types import FrameType

import pytest
from branching_graphs import plan_of, random_graph, request_for, step_s
from machine import next_tokens
from model import Layer
from torch import Tensor, nn
from torch.nn import functional

from pipeloom import Job, capture, plan
from pipeloom.ir.action import F
from pipeloom.ir.errors import InfeasibleError
from pipeloom.planner.notes import planners_asked
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.plan_table import limits
from pipeloom.planner.planners import PLANNERS, FastestPlan, by_cuts
from pipeloom.planner.searched_order import with_searched_order
from pipeloom.schedules import registry


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_no_planner_that_is_asked_is_faster(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not seed:  # the quick case: some of them
        few = replace(PLANNERS["auto"], plan=FastestPlan(("dawnpiper", "exact", "balanced")))
        monkeypatch.setitem(PLANNERS, "auto", few)
    how = request_for(*random_graph(seed, 10 if seed else 5, "series-parallel"), 2, slack=1.2)
    steps = {name: step_s(how, name) for name in PLANNERS["auto"].plan.names}
    shortest = min(steps.values())
    if shortest == inf:
        with pytest.raises(InfeasibleError):
            plan_of(how, "auto")
        return
    plan = plan_of(how, "auto")
    asked = planners_asked(plan)
    searched = asked.pop("searched", None)
    assert asked == {name: None if step == inf else step for name, step in steps.items()}
    assert plan.predicted_step_s == (searched or shortest) <= shortest
    assert plan.planner == "auto"
    assert any("the fastest plan of several planners: dawnpiper" in said for said in limits(plan))


def test_what_fits_for_one_alone_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    how = request_for(*random_graph(0, 8, "chain"), 2)
    monkeypatch.setitem(PLANNERS, "never", replace(PLANNERS["exact"], plan=by_cuts(lambda search: ())))
    monkeypatch.setitem(PLANNERS, "auto", replace(PLANNERS["auto"], plan=FastestPlan(("never", "exact"))))
    steps = {"never": None, "exact": step_s(how, "exact")}
    assert planners_asked(plan_of(how, "auto")).items() >= steps.items()
    monkeypatch.setitem(PLANNERS, "auto", replace(PLANNERS["auto"], plan=FastestPlan(("never",))))
    with pytest.raises(InfeasibleError, match="2 stages"):
        plan_of(how, "auto")


@pytest.mark.parametrize("kind", ["chain", "series-parallel"])
def test_a_searched_order_keeps_the_caps_and_is_what_is_simulated(kind: str) -> None:
    graph, profile = random_graph(3, 12, kind)
    how = request_for(graph, profile, 3, slack=1.5)
    plan = plan_of(how, "exact")
    costs = PlanCosts(graph, profile, how.cluster)
    found = with_searched_order(plan, costs)
    assert found is not None, "1f1b of uneven stages without a split backward leaves something to gain"
    assert found.schedule == "searched" and found.stages != ()
    assert found.predicted_step_s < plan.predicted_step_s
    timeline = costs.simulate(found)
    assert timeline.step_s == found.predicted_step_s
    assert all(timeline.peak_bytes(rank) == peak for rank, peak in enumerate(found.peaks))
    assert all(peak <= cap for peak, cap in zip(found.peaks, plan.caps, strict=True))
    done = [sorted(action.microbatch for action in row if action.kind == F) for row in found.as_schedule.rows]
    assert done == [list(range(plan.microbatches))] * 3


def test_orders_of_plans_without_a_flush_are_left_as_they_are() -> None:
    graph, profile = random_graph(3, 12, "chain")
    how = request_for(graph, profile, 2)
    plan = plan_of(replace(how, options=replace(how.options, weights="2bw")), "exact")
    assert with_searched_order(plan, PlanCosts(graph, profile, how.cluster)) is None


MOST_BUILDS = 163
"""A quarter of what `auto` built for such a model at f15020f, with plans and cuts that cannot win."""


class Words(nn.Module):
    """Four Transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.Sequential(*(Layer(32, 4, 128, causal=True) for _ in range(4)))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.layers(self.embed(tokens)))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


@pytest.mark.slow
def test_auto_builds_few_schedules() -> None:
    """On devices whose caps hardly bind."""
    job = Job(name="words", model=Words, batch=next_tokens(50, 16))
    captured = capture(job, 2)
    how = {"ranks": 4, "microbatches": 8, "microbatch_size": 2, "cluster": "4 x a100-40", "memory": "2MiB"}
    builds = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal builds
        builds += event == "call" and frame.f_code is registry.build.__code__

    sys.setprofile(count)
    try:
        made = plan(job, captured=captured, planner="auto", **how)
    finally:
        sys.setprofile(None)
    print(f"{len(captured.graph.ops)} ops: {builds} schedules built, a step of {made.predicted_step_s} s")
    assert 0 < builds <= MOST_BUILDS
