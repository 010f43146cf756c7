"""Looking for other micro-batch sizes met some that cannot be, and said that instead of what was wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipeloom import Job, plan
from pipeloom.api import passes
from pipeloom.ir.errors import CaptureError, InfeasibleError
from pipeloom.planner import find_cluster

Batch = dict[str, torch.Tensor]


def normalised() -> nn.Module:
    """Needs two rows for its statistics."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16))


def rows_of(seed: int, rows: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(rows, 16, generator=generator)}


def pairs(seed: int, rows: int) -> Batch:
    """Rows come in twos."""
    assert rows % 2 == 0, "an odd number of rows"
    return rows_of(seed, rows)


def job(batch: Callable[[int, int], Batch] = rows_of) -> Job:
    return Job(model=normalised, batch=batch, loss=lambda outputs, _: outputs.square().mean())


@pytest.mark.parametrize("batch", [rows_of, pairs])
def test_what_does_not_fit_is_said_where_smaller_ones_cannot_be(batch: Callable[[int, int], Batch]) -> None:
    with pytest.raises(InfeasibleError, match="stage . needs") as caught:
        plan(job(batch), stages=2, microbatch_size=4, cluster="2 x cpu with 1KiB")
    assert "at least" in str(caught.value.hint)


def test_the_largest_one_is_found_among_those_that_can_be() -> None:
    few = plan(job(pairs), stages=2, microbatch_size=4, microbatches=2, cluster="2 x cpu")
    cluster = find_cluster(f"2 x cpu with {2 * max(few.peaks)}B")
    how = passes.planning(job(pairs), stages=2, microbatches=2, cluster=cluster)
    for start in (1, 4, 7):
        found, sample = passes.plan_largest(how, job(pairs), start, cluster)
        assert found.microbatch_size == sample.size > 4
        assert sample.size % 2 == 0
    with pytest.raises(InfeasibleError):
        plan(job(pairs), stages=2, microbatches=2, microbatch_size=sample.size + 2, cluster=cluster)


def test_a_batch_that_never_can_be_is_said_with_its_reason() -> None:
    def none(seed: int, rows: int) -> Batch:
        raise LookupError("no data")

    how = passes.planning(job(none), stages=2, cluster=find_cluster("2 x cpu"))
    with pytest.raises(CaptureError, match="Job.batch of model failed for 4 rows: LookupError: no data"):
        passes.plan_largest(how, job(none), 4, how.cluster)


@pytest.mark.parametrize(("schedule", "whole"), [("dualpipe", 12), ("chimera", 10)])
def test_schedules_in_two_directions_pass_over_odd_numbers(schedule: str, whole: int) -> None:
    small = Job(
        model=lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), batch=rows_of,
        loss=lambda outputs, _: outputs.square().mean(),
    )  # fmt: skip
    cluster = find_cluster("2 x cpu with 1GiB")
    how = passes.planning(small, stages=2, cluster=cluster, schedule=schedule, global_batch=whole)
    found, _ = passes.plan_largest(how, small, 4, cluster)
    assert found.microbatch_size == whole // 2
    assert found.microbatches == 2


def test_a_large_global_batch_is_divided_at_once() -> None:
    how = passes.planning(job(), stages=2, cluster=find_cluster("2 x cpu"), global_batch=10**15)
    assert how.microbatches_of(1000) == 10**12
    with pytest.raises(Exception, match="no multiple of 7 rows"):
        how.microbatches_of(7)
