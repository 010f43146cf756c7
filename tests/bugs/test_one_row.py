"""Of one row, a captured model may lack ops that it has of several (GPT-2 does): sizes are not interpolated
from there. The search for the largest micro-batch ended with a message about samples of different models."""

from dataclasses import replace

import pytest
from layered import layered

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.units import parse_bytes
from pipeloom.plan_advice import plan_with_advice
from pipeloom.plan_request import PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.request import PlanOptions
from pipeloom.planning import estimate, largest_below, largest_plan


def planning(**options) -> PlanRequest:
    cluster = find_cluster("2 x a100-40")
    devices = tuple(replace(device, memory_bytes=parse_bytes("2GiB")) for device in cluster.devices)
    asked = PlanOptions(microbatches=4, planner="balanced", **options)
    return PlanRequest(cluster=replace(cluster, devices=devices), options=asked)


def take(size: int) -> ProfiledModel:
    graph = layered(2 if size == 1 else 3, rows=size, hidden=512, length=256)
    return ProfiledModel(size=size, graph=graph, profiles=estimate(graph, planning().cluster))


@pytest.mark.parametrize("start", [1, 2, 4])
def test_the_largest_plan_is_found_from_any_size(start):
    plan, sample = largest_plan(planning(microbatch_size=start), take)
    assert plan.microbatch_size == sample.size > 1
    assert planning().fits(take(sample.size)) and not planning().fits(take(sample.size + 1))


@pytest.mark.parametrize("global_batch", [1, 3, 8])
def test_with_a_global_batch(global_batch):
    plan, _ = largest_plan(planning(global_batch=8 * global_batch, microbatch_size=1), take)
    assert plan.microbatch_size * plan.microbatches == 8 * global_batch
    plan, _ = largest_plan(planning(global_batch=global_batch, microbatch_size=1), take)
    assert plan.microbatch_size in (1, global_batch)


def test_the_largest_below_a_known_size():
    most = largest_plan(planning(microbatch_size=2), take)[0].microbatch_size
    assert largest_below(planning(), take(4 * most), take) == most
    assert largest_below(planning(), take(2), take) == 1


def test_no_size_is_advised_where_none_fits():
    """The hint was to use smaller micro-batches, also where the weights alone were too much."""
    tiny = replace(planning().changed(planner="exact"), cluster=find_cluster("2 x a100-40 with 1KiB"))
    known = take(2)
    assert largest_below(tiny, known, take) == 0
    with pytest.raises(InfeasibleError) as caught:
        plan_with_advice(tiny, known, lambda: largest_below(tiny, known, take))
    assert caught.value.hint.startswith("give each device at least")
    assert "micro-batches" not in caught.value.hint
