"""A profile of a model that was captured as whole modules: each op run as a stage of its own.

Ops with equal modules and equal shapes are measured once, if they run the same kernels: what a module is made
with, such as how often it repeats something, need not be in its text. What a stage's run spends on the way to
its first module is timed too, and taken off. For a device that is not there a stage runs on the CPU, and its
time is that of its kernels by roofline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..ir.cluster import Device
from ..ir.graph import Op, OpGraph
from ..ir.profile import OpCost, Profile
from ..ir.stages import StageGraph, cut
from ..tracer.captured import Captured
from ..tracer.modules.functions import ModuleFunctions
from ..tracer.modules.skeleton import initial_state
from ..tracer.stage.functions import DiscardSink, Tensors, activation_bytes
from ..tracer.stage.trace import stage_functions
from .measure_op import LEAST_REPEATS, Timer, each_once, measured_profile, torch_threads
from .roofline import kernel_seconds, require_rates
from .rules import UNKNOWN, base_name, recurrent_flops, rule_of


def measure_modules(captured: Captured, device: str) -> Profile:
    """Measure every op of a captured model whose `graph.fallback` is set, with one CPU thread,
    whose own time counts.

    device: where to run, "cpu" or "cuda".
    """
    timer = Timer(torch.device(device), thread_time)
    with torch_threads(1):
        costs = _costs(captured, timer, budget_s=3.0)  # in all; slow ops get three runs all the same
    return measured_profile(captured.graph, timer.device, costs)


def estimate_modules(captured: Captured, device: Device) -> Profile:
    """Costs of every op of a model whose `graph.fallback` is set, on a device described by figures.

    Raises: ConfigError if the device has no rates.
    """
    require_rates(device)
    costs = _costs(captured, _Roofline(device), budget_s=0.0)
    return replace(
        measured_profile(captured.graph, torch.device("cpu"), costs), device=device.name, source="roofline"
    )


class _Roofline(Timer):
    """Adds up what a function's kernels take on a device that is not there."""

    def __init__(self, described: Device) -> None:
        super().__init__(torch.device("cpu"))
        self._described = described

    def samples(self, run: Callable[[], Any], budget_s: float) -> list[float]:
        return [self.once(run)]

    def once(self, run: Callable[[], Any]) -> float:
        kernels = _Kernels(self._described)
        with kernels:
            run()
        return kernels.seconds


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the roofline times of the kernels that run. Views run none."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        rule = rule_of(str(func))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if func.is_view or rule.kind == "free" or not made:
            return out
        flops = _product_flops(func, args, kwargs, out)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        moved = sum(t.numel() * t.element_size() for t in (*read, *made))
        kind = rule.kind if flops is None or rule is not UNKNOWN else "matmul"
        self.seconds += kernel_seconds(
            self._device,
            made[0].numel() if flops is None else flops,
            moved,
            kind,
            str(made[0].dtype).removeprefix("torch."),
        )
        return out


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the kernels that run, with the shapes and dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Hashable] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        self.made.append((str(func), *((t.shape, t.dtype) for t in tensors)))
        return out


_PASSES = {"mkldnn_rnn_layer": 1, "mkldnn_rnn_layer_backward": 2}
"""A layer of an LSTM on the CPU, of which PyTorch counts nothing -> how often data passes its weights. One
kernel makes the gradients of values and of parameters."""


def _product_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
    """Operations of a kernel that multiplies matrices; None for others."""
    if passes := _PASSES.get(base_name(str(func))):
        data, *weights = args[:5]
        return passes * recurrent_flops([data.shape], [weight.shape for weight in weights])
    count = flop_registry.get(_counted_as(func))
    flops: float | None = None if count is None else count(*args, **kwargs, out_val=out)
    return flops


def _counted_as(func: Any) -> Any:
    """PyTorch counts the attention of GPUs only. The one of CPUs has the same products."""
    packet = func.overloadpacket
    return getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), packet)


def _costs(captured: Captured, timer: Timer, budget_s: float) -> dict[str, OpCost]:
    graph = captured.graph
    assert captured.cut is not None, "the ops of this model are no modules"
    signatures = {op.name: _signature(op, graph) for op in graph.ops}
    stages = _one_stage_per_op(graph)
    number = {op.name: index for index, op in enumerate(graph.ops)}

    def run_of(op: Op) -> _OpRun:
        functions = stage_functions(captured, stages, number[op.name], device=timer.device.type)
        assert isinstance(functions, ModuleFunctions)
        return _OpRun(captured, functions, timer.device)

    def measured(op: Op, share_s: float) -> OpCost:
        return _measure(graph, op, run_of(op), timer, share_s)

    seem_equal = Counter(signatures.values())
    for op in graph.ops:
        if seem_equal[signatures[op.name]] > 1:
            signatures[op.name] = signatures[op.name], run_of(op).kernels()
    found = each_once(graph.ops, signatures, budget_s, measured)
    return {op.name: _renamed(found[op.name], op) for op in graph.ops}


def _one_stage_per_op(graph: OpGraph) -> StageGraph:
    """Every op a stage. Buffers are not followed from step to step here, so any cut will do."""
    loose = replace(graph, ops=tuple(replace(op, updates=()) for op in graph.ops))
    return cut(loose, {op.name: index for index, op in enumerate(graph.ops)})


def _signature(op: Op, graph: OpGraph) -> Hashable:
    read = [graph.value[name] for name in op.inputs]
    values = [(v.shape, v.dtype, v.needs_grad) for v in (*read, *op.outputs)]
    params = [(graph.parameter[p].shape, graph.parameter[p].trainable) for p in op.params]
    buffers = [graph.buffer[b].shape for b in op.buffers]
    last = any(v.name == graph.loss for v in op.outputs)
    return op.attributes, len(read), tuple(values), tuple(params), tuple(buffers), last


def _renamed(equal: tuple[Op, OpCost], op: Op) -> OpCost:
    """Costs of an equal op, in terms of this one's values."""
    measured, cost = equal
    before = (*measured.inputs, *(v.name for v in measured.outputs))
    name_of = dict(zip(before, (*op.inputs, *(v.name for v in op.outputs)), strict=True))
    return replace(cost, saves=tuple(name_of[name] for name in cost.saves))


class _OpRun:
    """The forward of an op, as a stage of its own, and what runs ahead of its first module."""

    def __init__(self, captured: Captured, functions: ModuleFunctions, device: torch.device) -> None:
        assert captured.cut is not None
        names = [*functions.params, *functions.buffers]
        self.functions = functions
        self.state = initial_state(captured.cut.skeleton, names, device)
        self.inputs = {n: t.to(device) for n, t in captured.cut.batch.items()} | dict(functions.examples)
        self._before = replace(functions, task=functions.task.before(), sent=(), differentiable=False)

    def whole(self) -> tuple[dict[str, Tensor], Tensors]:
        return self.functions.forward(self.state, self.inputs, 0)

    def ahead(self) -> tuple[dict[str, Tensor], Tensors]:
        return self._before.forward(self.state, self.inputs, 0)

    def kernels(self) -> Hashable:
        """Those of the op's own modules, in order."""
        with torch.no_grad():
            with _Calls() as ahead:
                self.ahead()
            with _Calls() as whole:
                self.whole()
        return tuple(whole.made[len(ahead.made) :])


def _measure(graph: OpGraph, op: Op, run: _OpRun, timer: Timer, budget_s: float) -> OpCost:
    functions = run.functions
    with torch.no_grad():
        outputs, residuals = run.whole()
        saves, extra = _saved(op, functions, outputs, residuals)
        del outputs, residuals
        ahead_s = timer(run.ahead, budget_s / 8)
        whole_s = timer(run.whole, budget_s / 4)
        input_grad_s, both_s = _backward_s(functions, run.state, run.inputs, timer)
    peaks, output_bytes = functions.peak_bytes, sum(v.bytes for v in op.outputs)
    back = sum(graph.value[n].bytes for n in op.inputs if graph.value[n].needs_grad)
    kept = sum(functions.residual_bytes.values())
    return OpCost(
        forward_s=max(whole_s - ahead_s, 0.0),
        input_grad_s=input_grad_s,
        weight_grad_s=max(0.0, both_s - input_grad_s),
        saves=saves,
        extra_saved_bytes=extra,
        transient_bytes=max(0, peaks["forward"] - kept - output_bytes, peaks.get("backward", 0) - back),
    )


def _saved(
    op: Op, functions: ModuleFunctions, outputs: Mapping[str, Tensor], residuals: Tensors
) -> tuple[tuple[str, ...], int]:
    """Names of the inputs and outputs that are kept for the backward, and bytes of all else that is. A batch
    input may be kept that only code of earlier ops reads, which runs again."""
    storages = {t.untyped_storage()._cdata for slot, t in residuals.items() if slot.kind == "residual"}
    named = [n for n in functions.sent if outputs[n].untyped_storage()._cdata in storages]
    extra = activation_bytes(residuals) - sum(outputs[n].nbytes for n in named)
    return (*sorted(functions.saved_inputs.intersection(op.inputs)), *named), extra


def _backward_s(
    functions: ModuleFunctions, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], timer: Timer
) -> tuple[float, float]:
    """Seconds of the input gradient alone, and of both gradients at once."""

    def timed(run: Callable[[Tensors, Mapping[str, Tensor]], object]) -> float:
        times = []
        for _ in range(LEAST_REPEATS + 1):
            outputs, residuals = functions.forward(state, inputs, 0)
            grads = {n: torch.ones_like(t) for n, t in outputs.items() if not n.startswith("buffer:")}
            times.append(timer.once(lambda r=residuals, g=grads: run(r, g)))  # type: ignore[misc]
        return median(times[1:])

    if not functions.differentiable:
        return 0.0, 0.0
    return (
        timed(lambda residuals, grads: functions.backward_input(state, residuals, grads)),
        timed(lambda residuals, grads: functions.backward(state, residuals, grads, DiscardSink())),
    )
