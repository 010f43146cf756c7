"""The micro-batch size with the fastest step, against trying all."""

from dataclasses import replace

import pytest
from layered import layered

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import ConfigError, InfeasibleError
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_request import PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.shape_search import divisors
from pipeloom.planning import best_plan, estimate

TWO = find_cluster("2 x a100-40")


def planning(memory: str = "2GiB", **options) -> PlanRequest:
    devices = tuple(replace(device, memory_bytes=parse_bytes(memory)) for device in TWO.devices)
    cluster = options.pop("cluster", replace(TWO, devices=devices))
    asked = {"microbatches": 4, "microbatch_size": 2, "global_batch": 24, **options}
    return PlanRequest(cluster=cluster, options=PlanOptions(**asked))


def take(size: int) -> ProfiledModel:
    graph = layered(4, rows=size, hidden=512, length=128)
    return ProfiledModel(size=size, graph=graph, profiles=estimate(graph, TWO))


@pytest.mark.parametrize(
    ("strategy", "memory"),
    [
        ("exact", "2GiB"),
        ("exact", "900MiB"),
        pytest.param("graphpipe", "9GiB", marks=pytest.mark.slow),
    ],
)
def test_the_best_size_is_as_fast_as_the_fastest_of_all(strategy, memory):
    request = planning(memory, planner=strategy)
    plan, model = best_plan(request, take)
    assert plan.microbatch_size == model.size
    assert plan.microbatch_size * plan.microbatches == 24
    steps = {}
    for size in divisors(24):
        try:
            steps[size] = request.plan(take(size)).predicted_step_s
        except InfeasibleError:
            continue
    assert plan.predicted_step_s == pytest.approx(min(steps.values()))
    assert 1 < len(steps)


def test_replicas_share_the_rows():
    four = find_cluster("4 x a100-40")
    plan, _ = best_plan(planning(cluster=four, replicas=2), take)
    assert plan.width == 2
    assert plan.microbatch_size * plan.microbatches == 24


def test_without_rows_per_step_there_is_no_best_size():
    with pytest.raises(ConfigError, match="rows per step") as caught:
        best_plan(planning(global_batch=None), take)
    assert "--global-batch" in caught.value.hint


def test_where_no_size_fits_it_says_what_would():
    with pytest.raises(InfeasibleError) as caught:
        best_plan(planning("20MiB"), take)
    assert "give each device at least" in caught.value.hint
