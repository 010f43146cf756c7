"""Which sizes of micro-batches are tried and which advised; the largest one, and the fastest one."""

from collections.abc import Callable

import pytest
from batches import Batch, normal
from layered import layered
from refusals import refused
from torch import nn

from pipeloom import Job, plan
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import ConfigError, InfeasibleError
from pipeloom.plan_request import PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.shape_search import divisors
from pipeloom.planning import best_plan, estimate, largest_below, largest_plan, make_request, plan_at_size

TWO = find_cluster("2 x a100-40 with 2GiB")


def asked(cluster: str = "2 x a100-40 with 2GiB", **options) -> PlanRequest:
    options = {"microbatches": 4, "planner": "balanced"} | options
    return PlanRequest(cluster=find_cluster(cluster), options=PlanOptions(**options))


def modelled(size: int, layers: int, length: int) -> ProfiledModel:
    graph = layered(layers, rows=size, hidden=512, length=length)
    return ProfiledModel(size=size, graph=graph, profiles=estimate(graph, TWO))


def take(size: int) -> ProfiledModel:
    """Of one row, a captured model may lack ops that it has of several (GPT-2 does)."""
    return modelled(size, 2 if size == 1 else 3, 256)


@pytest.mark.parametrize("start", [1, 4])
def test_the_largest_plan_is_found_from_any_size(start):
    """Sizes are not interpolated from one row: the search ended with a message about samples of different
    models."""
    plan, model = largest_plan(asked(microbatch_size=start), take)
    assert plan.microbatch_size == model.size > 1
    assert asked().fits(take(model.size)) and not asked().fits(take(model.size + 1))
    assert largest_below(asked(), take(4 * model.size), take) == model.size
    assert largest_below(asked(), take(2), take) == 1


def test_the_largest_plan_divides_a_global_batch():
    for rows in (24, 3):
        plan, _ = largest_plan(asked(global_batch=rows, microbatch_size=1), take)
        assert plan.microbatch_size * plan.microbatches == rows


def take_four(size: int) -> ProfiledModel:
    return modelled(size, 4, 128)


@pytest.mark.parametrize(
    ("planner", "memory"),
    [("exact", "900MiB"), pytest.param("graphpipe", "9GiB", marks=pytest.mark.slow)],
)
def test_the_best_size_is_as_fast_as_the_fastest_of_all(planner, memory):
    request = asked(f"2 x a100-40 with {memory}", planner=planner, microbatch_size=2, global_batch=24)
    plan, model = best_plan(request, take_four)
    assert plan.microbatch_size == model.size
    assert plan.microbatch_size * plan.microbatches == 24
    steps = {}
    for size in divisors(24):
        try:
            steps[size] = request.plan(take_four(size)).predicted_step_s
        except InfeasibleError:
            continue
    assert plan.predicted_step_s == pytest.approx(min(steps.values()))
    assert 1 < len(steps)


@pytest.mark.parametrize(
    ("memory", "batch", "error", "hint"),
    [
        ("2GiB", None, ConfigError, "--global-batch"),
        ("20MiB", 24, InfeasibleError, "give each device at least"),
    ],
)
def test_where_there_is_no_best_size_it_says_what_helps(memory, batch, error, hint):
    request = asked(f"2 x a100-40 with {memory}", planner="exact", microbatch_size=2, global_batch=batch)
    assert hint in refused(error, best_plan, request, take_four)


rows_of = normal(input=(16,))


def normalised(number: int = 1) -> Job:
    """Needs two rows for its statistics, and makes batches of multiples of a number only; none of 0."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16))

    def batch(seed: int, rows: int) -> Batch:
        if not number or rows % number:
            raise LookupError("no data")
        return rows_of(seed, rows)

    return Job(model=model, batch=batch, loss=lambda outputs, _: outputs.square().mean())


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, 2])
def test_the_largest_one_is_found_among_those_that_can_be(number: int) -> None:
    job, how = normalised(number), {"ranks": 2, "microbatches": 2}
    few = plan(job, microbatch_size=number, cluster="2 x cpu", **how)
    how["cluster"] = f"2 x cpu with {3 * max(few.peaks)}B"
    found, model = plan_at_size(make_request(microbatch_size=number, **how), job, largest_plan)
    assert found.microbatch_size == model.size > number
    for size in (4 * model.size, model.size + number):
        said = refused(InfeasibleError, plan, job, microbatch_size=size, **how)
        assert size < 4 * model.size or f"at most {model.size} rows" in said


@pytest.mark.parametrize("search", [largest_plan, best_plan])
def test_a_batch_that_never_can_be_says_so_itself(search: Callable) -> None:
    how = make_request(ranks=2, cluster="2 x cpu", global_batch=8)
    with pytest.raises(ConfigError, match="LookupError: no data"):
        plan_at_size(how, normalised(0), search)


def test_global_batches_that_are_large_or_cannot_be_divided() -> None:
    how = make_request(ranks=2, cluster="2 x cpu", global_batch=10**15)
    assert how.microbatches_of(1000) == 10**12
    assert "no multiple of 7 rows" in refused(ConfigError, how.microbatches_of, 7)
    odd = how.changed(schedule="dualpipe", global_batch=9, microbatch_size=1)
    assert "9 rows" in refused(ConfigError, plan_at_size, odd, normalised(), largest_plan)
