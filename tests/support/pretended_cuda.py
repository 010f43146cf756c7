"""A CUDA device that is not there: its tensors are the host's with a mark, and each time that the host waits
for the device is noted.

Whatever is made on "cuda", moved there, or computed from such a tensor has the mark. The host waits when it
reads a marked number, when it copies between pageable memory and the device, and for an event that the
device has not reached; after that the device has done all that came before.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
