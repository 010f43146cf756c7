"""How often the host waits for a CUDA device in one step, with a pretended device: whoever reads a number of
the device in a step, or copies to it from memory that is not pinned, adds to the count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from deep import ROWS, TANH
from delayed import job_of, steady_plan
from pretended_cuda import CUDA, pretended_cuda
from runs import each_rank, even_plan
from torch import Tensor

from pipeloom import Job, Options, Pipeline
from pipeloom.ir.plan import Plan

CLIP = 0.001


def two_stages(microbatches: int, placement: tuple[int, ...] = (0, 0)) -> Plan:
    return even_plan(
        TANH, 2, microbatches=microbatches, microbatch_size=ROWS, schedule="gpipe", placement=placement
    )


def waits_of_last_step(job: Job, plan: Plan, accumulate: int = 1) -> list[str]:
    """Where the host waits in the third step. Its numbers are those of a rank on the CPU."""
    options = {"clip_norm": CLIP, "accumulate": accumulate, "compare": False}
    rows = plan.microbatches * plan.microbatch_size * accumulate
    batches = [job.batch(seed, rows) for seed in range(3)]

    def losses_and_norms(pipeline: Pipeline, before: list[str]) -> list[tuple[float, float | None]]:
        found = []
        for batch in batches:
            before.clear()
            found.append((pipeline.step(batch), pipeline.report.grad_norm))
        return found

    with Pipeline(job, plan, options=Options(**options)) as pipeline:
        expected = losses_and_norms(pipeline, [])
    with (
        pretended_cuda() as cuda,
        Pipeline(job, plan, options=Options(device="cuda", **options)) as pipeline,
    ):
        assert {p.device for p in pipeline.weights.params.values()} == {CUDA}
        assert losses_and_norms(pipeline, cuda.waits) == expected
        waits = list(cuda.waits)
        cuda.waits.clear()
        pipeline.evaluate(batches[0])
        assert len(cuda.waits) == 1, cuda.waits
    print(*waits, sep="\n")
    return waits


@pytest.mark.parametrize(("microbatches", "accumulate"), [(2, 1), (6, 1), (2, 3)])
def test_a_step_waits_once_whatever_it_has_of_micro_batches(microbatches: int, accumulate: int) -> None:
    assert len(waits_of_last_step(TANH, two_stages(microbatches), accumulate)) == 1


def test_without_a_flush_each_row_waits_once() -> None:
    """A step of its own is two rows: one that is fed, and the drain."""
    job = job_of()
    assert len(waits_of_last_step(job, steady_plan(job, 1, 4))) == 2


def test_a_rank_takes_only_inputs_that_it_reads() -> None:
    """The first stage reads x and the last one y; both were copied to both devices."""

    def inputs(pipeline: Pipeline) -> list[set[str]]:
        parts = pipeline.batches.take(TANH.batch(0, 2 * ROWS), step=0, training=True)
        return [set(part.inputs) for part in parts]

    assert each_rank(TANH, two_stages(2, (0, 1)), inputs, compare=False) == [[{"x"}] * 2, [{"y"}] * 2]


@pytest.mark.parametrize(
    "touch",
    [float, bool, Tensor.item, Tensor.tolist, Tensor.cpu, lambda t: t.to("cpu"), lambda t: torch.equal(t, t)],
)
def test_what_waits_is_noticed(touch: Callable[[Tensor], object]) -> None:
    with pretended_cuda() as cuda:
        touch(torch.ones((), device="cuda") * 2)
        torch.full((), 2.0, device="cuda").mul_(3).reshape(1)
    assert len(cuda.waits) == 1
