"""Versions of weights with what else may be done: recomputing, offloading, a learning rate that changes, the
older rule of PipeDream."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import runs
import torch
from delayed import STEPS, assert_equal, delayed, job_of, stashed, steady_plan, trained
from torch.optim.lr_scheduler import LambdaLR

from pipeloom.checks.weight_versions import versions
from pipeloom.runtime.weights import Weights


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("treatments", "ahead"),
    [
        (("recompute",), ()),
        (("recompute",), (0, 1, 2)),
        (("offload",), ()),
        (("offload", "recompute"), (1,)),
    ],
    ids=["inside", "ahead", "offload", "both"],
)
def test_what_is_recomputed_or_offloaded_changes_nothing(
    treatments: tuple[str, ...], ahead: tuple[int, ...], split: bool
) -> None:
    job = job_of()
    plan = runs.treated_plan(job, steady_plan(job, 3, 3, split=split), *treatments, ahead=ahead)
    assert_equal(trained(job, plan, drains=(3,)), delayed(job, 3))


@pytest.mark.parametrize("policy", ["2bw", "stash"])
def test_recomputing_uses_the_version_of_the_forward(policy: str) -> None:
    """A micro-batch that is in flight while the weights change is recomputed with the old ones."""
    job = job_of()
    plan = steady_plan(job, 3, 3, policy)
    expected = trained(job, plan)
    assert_equal(trained(job, runs.treated_plan(job, plan, "recompute")), expected)
    assert_equal(trained(job, runs.treated_plan(job, plan, "recompute", ahead=(0, 1, 2))), expected)


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("drains", [(), (1, 4)])
def test_the_learning_rate_follows_the_updates(drains: tuple[int, ...]) -> None:
    job = job_of()
    found = trained(job, steady_plan(job, 3, 4), scheduler=halving, drains=drains)
    assert_equal(found, delayed(job, 4, scheduler=halving))
    other = delayed(job, 4)
    assert found.losses[:2] == other.losses[:2] and found.losses[3:] != other.losses[3:]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("stages", [1, 3])
def test_stash_follows_the_published_rule(stages: int, optimizer: str) -> None:
    """Stage s of d: gradients at the versions of d - 1 - s updates ago, other stages at others."""
    job = job_of(optimizer)
    plan = steady_plan(job, stages, 1, "stash")
    assert_equal(trained(job, plan), stashed(job, plan))
    if stages > 1:
        assert stashed(job, plan).losses != delayed(job, 1).losses


@pytest.mark.parametrize(("policy", "microbatches"), [("2bw", 3), ("2bw", 4), ("stash", 1), ("stash", 2)])
def test_live_versions(policy: str, microbatches: int) -> None:
    """2bw: two on each stage.  stash: at most d - s on stage s. There are as many copies, and no more."""
    job, depth, step = job_of(), 4, Weights.step
    plan = steady_plan(job, depth, microbatches, policy)
    needed = [stage.needed for stage in versions(plan.as_schedule, plan.updates)]
    assert needed == [2] * depth if policy == "2bw" else all(n <= depth - s for s, n in enumerate(needed))
    most: dict[str, tuple[float, float]] = {}

    def counted(weights: Weights) -> None:
        step(weights)
        for name in list(weights.params)[:1]:
            size = sum(p.nbytes for p in weights.params.values())
            now = len(weights._versions), weights.sizes["parameters"] / size
            most[name] = max(most.get(name, now), now)

    with patch.object(Weights, "step", counted):
        found = trained(job, plan)
    stages = plan.stage_graph(runs.capture_of(job, 2).graph)
    stage_of = {name: s for s, names in enumerate(stages.params) for name in names}
    assert {stage_of[name]: kept for name, kept in most.items()} == {
        s: (needed[s], needed[s]) for s, names in enumerate(stages.params) if names
    }
    size = sum(t.nbytes for t in found.parameters.values())
    assert found.copied_bytes <= STEPS * size, "an update copies the parameters once, a switch nothing"


def test_an_update_of_a_single_version_copies_nothing() -> None:
    """The last stage of `stash` updates in place: nothing of it is in flight then."""
    job = job_of()
    found = trained(job, steady_plan(job, 1, 2, "stash"))
    assert found.copied_bytes == 0
