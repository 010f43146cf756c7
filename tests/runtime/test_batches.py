"""Batches as users make them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nets
import pytest
import torch
from deep import ROWS, TANH
from delayed import delayed, job_of, steady_plan
from runs import assert_same, each_rank, even_plan, pipelined, plain, threads

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import BatchError, CaptureError, PeerError, PipeloomError
from pipeloom.runtime.batches import agree_on_batch
from pipeloom.runtime.channel import Channel


def test_a_rank_takes_only_inputs_that_it_reads() -> None:
    """The first stage reads x and the last one y; both were copied to both devices."""
    plan = even_plan(TANH, 2, microbatches=2, microbatch_size=ROWS, schedule="gpipe", placement=(0, 1))

    def inputs(pipeline: Pipeline) -> list[set[str]]:
        parts, _ = pipeline.batches.take(TANH.batch(0, 2 * ROWS), step=0)
        return [set(part.inputs) for part in parts]

    assert each_rank(TANH, plan, inputs, compare=False) == [[{"x"}] * 2, [{"y"}] * 2]


@pytest.mark.slow
def test_inputs_that_are_slices() -> None:
    """Stages are traced with contiguous inputs: a `view` of a slice failed."""

    def sliced(seed: int, size: int) -> nets.Batch:
        ids = nets.token_batch(seed, size, length=nets.LENGTH + 1)["input_ids"]
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    job = replace(nets.job("gpt"), batch=sliced)
    batches = [job.batch(seed, 4) for seed in range(2)]
    found = pipelined(job, even_plan(job, 2, microbatches=2), batches, evaluate=batches[:1])
    assert_same(found, plain(job, batches, 2, evaluate=batches[:1]), tolerance=1e-5)


def test_equal_batches_are_equal_on_any_number_of_ranks() -> None:
    """A sum of squares of 32-bit numbers is not exact in float64: equal batches were called different."""
    shapes = [(f"x[{length}, 8]float32",) for length in range(40)]

    def agree(rank: int, channel: object) -> None:
        with channel.watch:
            for found in shapes:
                agree_on_batch(channel, found)

    threads(7, agree)


def after_refusals(job: Any, *refused: Callable[[int, Pipeline], object]) -> list[list[str]]:
    """What two ranks say to each refused call; then they train and evaluate as if it had not been."""
    plan = even_plan(job, 2, microbatches=4)
    batch = job.batch(0, 8)

    def rank(index: int, channel: Channel) -> tuple[list[str], list[float]]:
        said = []
        with Pipeline(job, plan, channel=channel, options=Options()) as pipeline:
            for call in refused:
                with pytest.raises(BatchError) as caught:
                    call(index, pipeline)
                said.append(caught.value.message)
            return said, [pipeline.step(batch), pipeline.evaluate(batch)]

    found = threads(2, rank, timeout_s=60.0)
    expected = pipelined(job, plan, [batch], evaluate=[batch])
    for _, numbers in found:
        assert numbers == [expected.losses[0], expected.evaluated[0]]
    return [said for said, _ in found]


def test_what_one_rank_refuses_none_begins() -> None:
    """A rank that began the step would wait for the one that refused."""
    job = replace(nets.job("skips"), weight=lambda part: float(next(iter(part.values())).abs().sum()))
    batch, other_graph = job.batch(0, 8), CaptureError("it has another graph")
    counts_nowhere = {name: torch.zeros_like(tensor) for name, tensor in batch.items()}

    def cannot_capture(rank: int, pipeline: Pipeline) -> None:
        with patch.object(pipeline.training, "_trace", side_effect=other_graph) if rank else nullcontext():
            pipeline.step(job.batch(0, 12))

    first, second = after_refusals(
        job,
        lambda rank, pipeline: pipeline.step(job.batch(0, 3)),
        lambda rank, pipeline: pipeline.evaluate(job.batch(0, 3)),
        lambda rank, pipeline: pipeline.step(job.batch(0, 8 + 4 * rank)),
        lambda rank, pipeline: pipeline.step(job.batch(rank, 8)),
        lambda rank, pipeline: pipeline.step(batch if rank else counts_nowhere),
        cannot_capture,
    )
    assert all("3 rows" in text for text in (*first[:2], *second[:2]))
    for at in (2, 3):
        assert first[at].startswith("rank 0 has a batch ") and second[at].startswith("rank 1 has a batch ")
    assert "no token" in first[4] and second[4] == f"{first[4]} (rank 0)"
    assert "another graph" in second[5] and first[5] == f"{second[5]} (rank 1)"


def test_a_run_that_goes_on_checks_its_first_batch_too(tmp_path: Path) -> None:
    """Shuffles of ranks went apart after `load`, without a word."""
    job = nets.job("skips")
    plan = even_plan(job, 2, microbatches=2)

    def saves(pipeline: Pipeline) -> None:
        pipeline.step(job.batch(0, 4))
        pipeline.save(tmp_path)

    def goes_on(pipeline: Pipeline) -> str:
        pipeline.load(tmp_path)
        with pytest.raises(BatchError, match="has a batch"):
            pipeline.step(job.batch(pipeline.rank, 4))
        return f"{pipeline.step(job.batch(1, 4)):.3f}"

    each_rank(job, plan, saves, compare=False)
    assert len(set(each_rank(job, plan, goes_on, compare=False))) == 1


def test_one_cycle_ends_at_the_same_batch_on_all_ranks() -> None:
    """Without a flush ranks have made different numbers of updates by then."""
    job = job_of()
    batches = [job.batch(seed, 4) for seed in range(7)]
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-3, total_steps=4)

    def ends(pipeline: Pipeline) -> int:
        with pytest.raises(PipeloomError, match="OneCycleLR"):
            list(pipeline.steps(batches))
        return pipeline.steps_done

    assert each_rank(job, steady_plan(job, 2, 2), ends, scheduler=cycle, compare=False) == [4, 4]


@pytest.mark.parametrize("sizes", [(12, 12), (8, 3)], ids=str)
def test_without_a_flush_all_ranks_refuse_a_batch_or_none_goes_on(sizes: tuple[int, int]) -> None:
    """Where only rank 1 has other batches, that is noticed when rank 0 has begun its own."""
    job = job_of()
    plan = steady_plan(job, 2, 4)

    def rank(index: int, channel: Channel) -> list[float]:
        with Pipeline(job, plan, channel=channel) as pipeline:
            losses = [pipeline.step(job.batch(0, 8))]
            with pytest.raises(BatchError, match="cannot be split"):
                pipeline.step(job.batch(1, 3))
            losses.append(pipeline.step(job.batch(1, 8)))
            batches = [job.batch(seed, size) for seed, size in enumerate(sizes if index else (8, 8))]
            with pytest.raises((BatchError, PeerError), match="another batch|cannot be split"):
                list(pipeline.steps(batches))
            with pytest.raises(PipeloomError):
                pipeline.step(job.batch(2, 8))
            return losses

    assert threads(2, rank, timeout_s=60.0) == [delayed(job, 4).losses[:2]] * 2
