"""How often the host waits for a CUDA device in one step, with a pretended device: whoever reads a number of
the device in a step, or copies to it from memory that is not pinned, adds to the count."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deep import ROWS, TANH
from delayed import job_of, steady_plan
from runs import even_plan
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


@pytest.mark.parametrize(("microbatches", "accumulate"), [(6, 1), (2, 3)])
def test_a_step_waits_once_whatever_it_has_of_micro_batches(microbatches: int, accumulate: int) -> None:
    assert len(waits_of_last_step(TANH, two_stages(microbatches), accumulate)) == 1


def test_without_a_flush_each_row_waits_once() -> None:
    """A step of its own is two rows: one that is fed, and the drain."""
    job = job_of()
    assert len(waits_of_last_step(job, steady_plan(job, 1, 4))) == 2


@pytest.mark.parametrize(
    "touch",
    [float, bool, Tensor.item, Tensor.tolist, Tensor.cpu, lambda t: t.to("cpu"), lambda t: torch.equal(t, t)],
)
def test_what_waits_is_noticed(touch: Callable[[Tensor], object]) -> None:
    with pretended_cuda() as cuda:
        touch(torch.ones((), device="cuda") * 2)
        torch.full((), 2.0, device="cuda").mul_(3).reshape(1)
    assert len(cuda.waits) == 1


# A CUDA device that is not there: its tensors are the host's with a mark, and each time that the host
# waits for the device is noted.


CUDA = torch.device("cuda", 0)


READS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose", "masked_select",
    "__float__", "__int__", "__bool__", "__index__", "__complex__", "__contains__", "__repr__", "__format__",
}  # fmt: skip


class OnDevice(Tensor):
    """A tensor of the pretended device."""

    device = CUDA  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]


class Pinned(Tensor):
    """A tensor in memory from which the device may copy by itself."""


class PretendedCuda(TorchFunctionMode):
    """waits: where the host has waited for the device, as lines of code.  computed: events so far.
    reached: how many of them the device has reached as far as the host knows."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.computed = self.reached = 0

    def wait(self) -> None:
        frames = [f for f in traceback.extract_stack() if "/pipeloom/" in f.filename]
        self.waits.append(f"{frames[-1].filename.rpartition('/')[2]}: {frames[-1].line}" if frames else "?")
        self.reached = self.computed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        marked = [a for a in args if isinstance(a, OnDevice)]
        target = next((a for a in (*args, *kwargs.values()) if _is_cuda(a)), None)
        if name == "pin_memory":
            return args[0].as_subclass(Pinned)
        if name in READS and marked:
            self.wait()
        if name == "copy_" and bool(marked) != isinstance(args[1], OnDevice):
            self.wait()
        if name == "to" and marked and any(str(a) == "cpu" for a in (*args, *kwargs.values())):
            self.wait()
        if target is None or func is torch.device:
            return func(*args, **kwargs)
        if name == "tensor" or (
            name == "to" and not marked and not (kwargs.get("non_blocking") and isinstance(args[0], Pinned))
        ):
            self.wait()
        args = tuple("cpu" if _is_cuda(a) else a for a in args)
        made = func(*args, **{k: "cpu" if _is_cuda(v) else v for k, v in kwargs.items()})
        return made.as_subclass(OnDevice) if isinstance(made, Tensor) else made


class Event:
    """Stands in for torch.Event."""

    device: PretendedCuda

    def __init__(self, enable_timing: bool = False) -> None:
        self.number = 0

    def record(self) -> None:
        self.device.computed += 1
        self.number = self.device.computed

    def synchronize(self) -> None:
        if self.number > self.device.reached:
            self.device.wait()

    def elapsed_time(self, end: Event) -> float:
        return float(end.number - self.number)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


@contextmanager
def pretended_cuda() -> Iterator[PretendedCuda]:
    """Let this thread have a CUDA device, for which stages are traced as for the CPU."""
    from pipeloom import rank_stages
    from pipeloom.tracer.stage import trace

    traced, device = trace.stage_functions, PretendedCuda()

    def traced_for_cpu(*args: Any, **how: Any) -> Any:
        return traced(*args, **how | {"device": "cpu"})

    with (
        patch.object(rank_stages, "stage_functions", traced_for_cpu),
        patch.object(torch.cuda, "device_count", lambda: 1),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "set_device", lambda index: None),
        patch.object(torch, "Event", Event),
        patch.object(Event, "device", device, create=True),
        device,
    ):
        yield device
