"""The models of `bench/graphpipe.py`: what they compute, how they are captured, and that cuts keep it."""

from __future__ import annotations

from dataclasses import replace

import graphpipe
import pytest
import torch
import zoo
from runs import capture_of, pipelined, plain, shared_captures

from pipeloom import Job, Plan, verify
from pipeloom.planning import plan

TOLERANCE = 1e-5


def planned(job: Job, stages: int, strategy: str) -> Plan:
    how = {"cluster": f"{stages} x v100-16", "planner": strategy, "captured": capture_of(job)}
    return plan(job, ranks=stages, microbatches=4, microbatch_size=2, **how)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stages"), [("exact", 4), *(("graphpipe", n) for n in (3, 4, 5, 6))])
@pytest.mark.parametrize("name", [*graphpipe.SMALL, "t5"])
def test_planned_stages_give_what_one_process_gives(name: str, strategy: str, stages: int) -> None:
    """The layers of T5's decoder all read what its encoder makes: one block of nearly all ops."""
    job = zoo.job("t5") if name == "t5" else graphpipe.SMALL[name]()
    with shared_captures():
        made = planned(job, stages, strategy)
        assert len(made.stages) == stages
        verify(job, made, tolerance=TOLERANCE).require()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(graphpipe.SMALL))
def test_ranks_train_by_planned_stages_as_one_process(name: str) -> None:
    job = graphpipe.SMALL[name]()
    job = replace(job, optimizer=job.optimizer or zoo.sgd)
    batches = [job.batch(seed, 8) for seed in range(3)]
    found = pipelined(job, planned(job, 4, "graphpipe"), batches)
    assert found.losses == pytest.approx(plain(job, batches, 4).losses, rel=TOLERANCE)
    assert len(set(found.losses)) == 3


def test_the_order_in_which_towers_run_changes_nothing() -> None:
    losses = []
    for name in ("mmt", "mmt_in_turn"):
        job = graphpipe.SMALL[name]()
        torch.manual_seed(0)
        losses.append(job.model()(**job.batch(1, 3))["loss"].item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", list(graphpipe.SMALL))
def test_data_follow_the_seed_and_fit_the_model(name: str) -> None:
    job = graphpipe.SMALL[name]()
    one, same, other = job.batch(1, 3), job.batch(1, 3), job.batch(2, 3)
    assert all(len(x) == 3 and torch.equal(x, same[key]) for key, x in one.items())
    assert any(not torch.equal(x, other[key]) for key, x in one.items())
    assert torch.isfinite(job.model()(**one)["loss"])
