"""Plans for a DAG of stages where messages, or sums of gradients, take long."""

from __future__ import annotations

import random

import pytest
from branching_graphs import cluster_of, random_graph, request_for

from pipeloom import plan_request
from pipeloom.planner.branches import BranchOrdered
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.strategies.graphpipe import shallow_cuts


def test_messages_that_take_longer_than_the_model_computes():
    """Cuts for a DAG of stages where messages take longer than the whole model computes. The bisection of
    `graphpipe` began at the time of a stage with all ops and no messages, which every stage then passed:
    it proposed nothing, and the plan was that of a chain."""
    graph, profile = random_graph(3, 8, "series-parallel")
    search = request_for(graph, profile, 3, bytes_per_s=0.01).search(BranchOrdered(tuple(range(8)), (0,)))
    cuts = next(shallow_cuts(search))
    assert cuts[0] == 0 and cuts[-1] == 8 and len(cuts) == 4


SLOW_LINKS = 10.0
"""Bytes per second at which the sum of a stage's gradients takes as long as some micro-batches."""


def request_of(seed: int) -> tuple[plan_request.PlanRequest, ProfiledModel]:
    """Two replicas of three stages for a random series-parallel graph."""
    graph, profile = random_graph(seed, random.Random(seed).randint(5, 8), "series-parallel")
    return plan_request.PlanRequest(
        cluster=cluster_of(6, bytes_per_s=SLOW_LINKS),
        options=PlanOptions(ranks=3, replicas=2, microbatches=12, planner="graphpipe", treatments=()),
    ), ProfiledModel(size=1, graph=graph, profiles={"d": profile})


@pytest.mark.slow
def test_replicas_of_a_dag_are_no_slower_than_those_of_a_chain() -> None:
    """A DAG of stages with several replicas is not slower than other plans once their gradients are
    summed."""
    request, model = request_of(11)
    made = request.plan(model)
    chain = request.changed(branches=False)
    others = [chain, request.changed(planner="exact")]
    assert made.planner == "graphpipe" and made.width == 2
    assert made.predicted_step_s <= min(way.plan(model).predicted_step_s for way in others) * (1 + 1e-9)
