"""Which sizes of micro-batches are tried, and which are advised."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from layered import layered
from torch import nn

from pipeloom import Job, plan, planning
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import ConfigError, InfeasibleError
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_advice import plan_with_advice
from pipeloom.plan_request import PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.request import PlanOptions
from pipeloom.planning import estimate, largest_below, largest_plan


def asked(**options) -> PlanRequest:
    cluster = find_cluster("2 x a100-40")
    devices = tuple(replace(device, memory_bytes=parse_bytes("2GiB")) for device in cluster.devices)
    chosen = PlanOptions(microbatches=4, planner="balanced", **options)
    return PlanRequest(cluster=replace(cluster, devices=devices), options=chosen)


def take(size: int) -> ProfiledModel:
    graph = layered(2 if size == 1 else 3, rows=size, hidden=512, length=256)
    return ProfiledModel(size=size, graph=graph, profiles=estimate(graph, asked().cluster))


@pytest.mark.parametrize("start", [1, 2, 4])
def test_the_largest_plan_is_found_from_any_size(start):
    """Of one row, a captured model may lack ops that it has of several (GPT-2 does): sizes are not
    interpolated from there. The search for the largest micro-batch ended with a message about samples of
    different models."""
    plan, sample = largest_plan(asked(microbatch_size=start), take)
    assert plan.microbatch_size == sample.size > 1
    assert asked().fits(take(sample.size)) and not asked().fits(take(sample.size + 1))


@pytest.mark.parametrize("global_batch", [1, 3, 8])
def test_with_a_global_batch(global_batch):
    plan, _ = largest_plan(asked(global_batch=8 * global_batch, microbatch_size=1), take)
    assert plan.microbatch_size * plan.microbatches == 8 * global_batch
    plan, _ = largest_plan(asked(global_batch=global_batch, microbatch_size=1), take)
    assert plan.microbatch_size in (1, global_batch)


def test_the_largest_below_a_known_size():
    most = largest_plan(asked(microbatch_size=2), take)[0].microbatch_size
    assert largest_below(asked(), take(4 * most), take) == most
    assert largest_below(asked(), take(2), take) == 1


def test_no_size_is_advised_where_none_fits():
    """The hint was to use smaller micro-batches, also where the weights alone were too much."""
    tiny = replace(asked().changed(planner="exact"), cluster=find_cluster("2 x a100-40 with 1KiB"))
    known = take(2)
    assert largest_below(tiny, known, take) == 0
    with pytest.raises(InfeasibleError) as caught:
        plan_with_advice(tiny, known, lambda: largest_below(tiny, known, take))
    assert caught.value.hint.startswith("give each device at least")
    assert "micro-batches" not in caught.value.hint


Batch = dict[str, torch.Tensor]


def normalised() -> nn.Module:
    """Needs two rows for its statistics."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16))


def rows_of(seed: int, rows: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(rows, 16, generator=generator)}


def multiples_of(number: int) -> Callable[[int, int], Batch]:
    """A batch function that makes no other sizes."""

    def batch(seed: int, rows: int) -> Batch:
        assert rows % number == 0, f"not in groups of {number}"
        return rows_of(seed, rows)

    return batch


def job(batch: Callable[[int, int], Batch] = rows_of) -> Job:
    return Job(model=normalised, batch=batch, loss=lambda outputs, _: outputs.square().mean())


@pytest.mark.parametrize("number", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_what_does_not_fit_is_said_where_smaller_ones_cannot_be(number: int) -> None:
    """Looking for other micro-batch sizes met some that cannot be, and said that instead of what was
    wrong."""
    with pytest.raises(InfeasibleError, match="stage . needs") as caught:
        plan(job(multiples_of(number)), ranks=2, microbatch_size=4, cluster="2 x cpu with 1KiB")
    assert "at least" in str(caught.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_the_largest_one_is_found_among_those_that_can_be(number: int) -> None:
    own = job(multiples_of(number))
    few = plan(own, ranks=2, microbatch_size=number, microbatches=2, cluster="2 x cpu")
    cluster = find_cluster(f"2 x cpu with {3 * max(few.peaks)}B")
    how = planning.make_request(own, ranks=2, microbatches=2, microbatch_size=number, cluster=cluster)
    found, sample = planning.plan_largest(how, own)
    assert found.microbatch_size == sample.size > number
    with pytest.raises(InfeasibleError) as caught:
        plan(own, ranks=2, microbatches=2, microbatch_size=4 * sample.size, cluster=cluster)
    assert f"use micro-batches of at most {sample.size} rows" in str(caught.value.hint)
    with pytest.raises(InfeasibleError):
        plan(own, ranks=2, microbatches=2, microbatch_size=sample.size + number, cluster=cluster)


@pytest.mark.parametrize("start", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 7)])
def test_it_may_begin_at_one_that_cannot_be(start: int) -> None:
    own = job(multiples_of(2))
    how = planning.make_request(own, ranks=2, cluster=find_cluster("2 x cpu with 64KiB"))
    sizes = {
        planning.plan_largest(how.changed(microbatch_size=begin), own)[0].microbatch_size
        for begin in (start, 2)
    }
    assert len(sizes) == 1


def test_a_batch_that_never_can_be_says_so_itself() -> None:
    def none(seed: int, rows: int) -> Batch:
        raise LookupError("no data")

    how = planning.make_request(job(none), ranks=2, cluster=find_cluster("2 x cpu"))
    with pytest.raises(LookupError, match="no data"):
        planning.plan_largest(how, job(none))


@pytest.mark.parametrize(("schedule", "whole"), [("dualpipe", 12), ("chimera", 10)])
def test_schedules_in_two_directions_pass_over_odd_numbers(schedule: str, whole: int) -> None:
    small = Job(
        model=lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))),
        batch=rows_of,
        loss=lambda outputs, _: outputs.square().mean(),
    )
    cluster = find_cluster("2 x cpu with 1GiB")
    how = planning.make_request(small, ranks=2, cluster=cluster, schedule=schedule, global_batch=whole)
    found, _ = planning.plan_largest(how, small)
    assert found.microbatch_size == whole // 2
    assert found.microbatches == 2


def test_a_large_global_batch_is_divided_at_once() -> None:
    how = planning.make_request(job(), ranks=2, cluster=find_cluster("2 x cpu"), global_batch=10**15)
    assert how.microbatches_of(1000) == 10**12
    with pytest.raises(ConfigError, match="no multiple of 7 rows"):
        how.microbatches_of(7)


def test_a_batch_that_the_schedule_cannot_divide() -> None:
    cluster = find_cluster("2 x cpu")
    how = planning.make_request(job(), ranks=2, cluster=cluster, schedule="dualpipe", global_batch=9)
    with pytest.raises(ConfigError, match="dualpipe cannot divide a global batch of 9 rows"):
        planning.plan_largest(how.changed(microbatch_size=1), job())
