"""A device that has no more memory: an error for users on the rank, and the end of all ranks."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from deep import ROWS, TANH
from runs import each_rank, even_plan

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import MemoryCapError, PeerError
from pipeloom.ir.text import format_bytes

CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB."


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(CUDA_SAYS)


def plan_of(ranks: int) -> Any:
    return even_plan(TANH, ranks, microbatches=4, microbatch_size=ROWS, schedule="gpipe")


def fails_in_1f2(pipeline: Pipeline) -> None:
    real = pipeline.training.planned.functions
    real[1] = other = replace(real[1])  # a copy: these are shared with other tests
    calls = [other.forward, other.forward, no_memory]
    object.__setattr__(other, "forward", lambda *args: calls.pop(0)(*args))


def fails_in_step(pipeline: Pipeline) -> None:
    pipeline.weights.optimizer.step = no_memory


@pytest.mark.parametrize(("spoil", "action"), [(fails_in_1f2, "1F2"), (fails_in_step, "1STEP")])
def test_an_action_ends_all_ranks(monkeypatch, spoil, action) -> None:
    for name, told in {"is_available": True, "memory_allocated": 3 << 30, "memory_reserved": 5 << 30}.items():
        monkeypatch.setattr(torch.accelerator, name, Mock(return_value=told))

    def work(pipeline: Pipeline) -> tuple[BaseException, int]:
        if pipeline.rank == 1:
            spoil(pipeline)
        with pytest.raises((MemoryCapError, PeerError)) as caught:
            pipeline.step(TANH.batch(0, 4 * ROWS))
        return caught.value, pipeline.ledger.levels["parameters"]

    (theirs, _), (own, parameters) = each_rank(TANH, plan_of(2), work, compare=False)
    assert isinstance(own, MemoryCapError) and own.hint is not None
    counted = f"parameters  {format_bytes(parameters)}"
    for part in ("rank 1 ", action, "2.50 GiB", "3.0 GiB", "5.0 GiB", counted):
        assert part in own.message
    assert isinstance(theirs, PeerError)
    assert f"rank 1 failed: MemoryCapError: {own.message.splitlines()[0]}" in str(theirs)


def test_parameters_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.runtime.weights.torch.zeros_like", no_memory)
    with pytest.raises(MemoryCapError, match=r"rank 0 .* start-up, with 3.4 KiB "):
        Pipeline(TANH, plan_of(1), options=Options(compare=False))


@pytest.mark.parametrize("called", ["runtime.checkpoint.load", "step_run.StepBatches.take"])
def test_what_is_no_action(monkeypatch: pytest.MonkeyPatch, called: str, tmp_path: Any) -> None:
    """Afterwards one rank goes on, as after any call that was broken off."""
    batch = TANH.batch(0, 4 * ROWS)
    with Pipeline(TANH, plan_of(1), options=Options(compare=False)) as pipeline:
        pipeline.save(tmp_path)
        call = partial(pipeline.step, batch) if "take" in called else partial(pipeline.load, tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(f"pipeloom.{called}", no_memory)
            with pytest.raises(MemoryCapError, match="rank 0 "):
                call()
        assert pipeline.step(batch) > -1e9
