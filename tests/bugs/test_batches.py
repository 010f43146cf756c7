"""Batches as users make them."""

from dataclasses import replace

import pytest
import torch
import zoo
from runs import assert_same, even_plan, pipelined, plain, threads

from pipeloom.ir.errors import BatchError
from pipeloom.runtime import agree_on_shapes


def sliced(seed: int, size: int) -> zoo.Batch:
    ids = zoo.token_batch(seed, size, length=zoo.LENGTH + 1)["input_ids"]
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_inputs_that_are_slices(name: str) -> None:
    """Stages are traced with contiguous inputs: a `view` of a slice failed."""
    job = replace(zoo.job(name), batch=sliced)
    batches = [job.batch(seed, 4) for seed in range(2)]
    found = pipelined(job, even_plan(job, 2, microbatches=2), batches, evaluate=batches[:1])
    assert_same(found, plain(job, batches, 2, evaluate=batches[:1]), tolerance=1e-5)


@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_equal_batches_are_equal_on_any_number_of_ranks(ranks: int) -> None:
    """A sum of squares of 32-bit numbers is not exact in float64: equal batches were called different."""
    shapes = [(f"x[{length}, 8]float32",) for length in range(40)]

    def agree(rank: int, channel: object) -> None:
        with channel.watch:
            for found in shapes:
                agree_on_shapes(channel, found, torch.device("cpu"))

    threads(ranks, agree)


def test_different_batches_are_refused_on_all_ranks() -> None:
    def disagree(rank: int, channel: object) -> None:
        with channel.watch, pytest.raises(BatchError, match=f"rank {rank} has a batch of x"):
            agree_on_shapes(channel, (f"x[{rank // 2}]",), torch.device("cpu"))

    threads(3, disagree)
