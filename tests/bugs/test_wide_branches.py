"""A DAG of stages with several replicas is not slower than other plans once their gradients are summed."""

from __future__ import annotations

import random

import pytest
from branching_graphs import cluster_of, random_graph

from pipeloom import plan_request
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.request import PlanOptions

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
    request, model = request_of(11)
    made = request.plan(model)
    chain = request.changed(branches=False)
    others = [chain, request.changed(planner="exact")]
    assert made.planner == "graphpipe" and made.width == 2
    assert made.predicted_step_s <= min(way.plan(model).predicted_step_s for way in others) * (1 + 1e-9)
