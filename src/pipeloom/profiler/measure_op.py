"""One op, run again and again: times, what autograd saves, and scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd.graph import saved_tensors_hooks

from ..ir.graph import Op, OpGraph, made_of_state
from ..ir.profile import OpCost, Profile, batch_text
from ..tracer.captured import Captured
from ..tracer.tensors import LiveBytes, tensors_of

T = TypeVar("T")
LEAST_REPEATS, MOST_REPEATS = 3, 50

BUSY_SIZE, BUSY_RUNS = 1024, 6
"""A device is kept busy by as many products of square matrices of this size: for 0.25 ms on an H200. They
leave most of its cache as it is."""

LONG_S, SLOW_S = 0.005, 0.1
"""Of a run that takes longer than LONG_S on the CPU the shortest time counts, not the median: now and then
glibc takes pages for its large tensors from the system afresh, which may take longer than the op. In ranks,
whose heap has grown, that is rare. A run that takes longer than SLOW_S is repeated once only: its first time
is the one in which memory was watched, and repeats of one huge product would take longer than those of all
other ops of a model."""


@dataclass(frozen=True, kw_only=True)
class OpMeasurement:
    """What one op took. Times in seconds, sizes in bytes.

    saved_args, saved_outputs: positions, among the distinct argument nodes and the results, of what
        autograd keeps.  extra: position-less rest, in bytes.
    """

    forward_s: float
    transient_bytes: int
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    saved_args: tuple[int, ...] = ()
    saved_outputs: tuple[tuple[int, int], ...] = ()
    """(position, bytes)"""
    extra_saved_bytes: int = 0
    grad_transient_bytes: int = 0
    passed_args: tuple[int, ...] = ()
    """Positions of the arguments whose gradient is the output's own."""


class Timer:
    """Seconds that a function takes on one device: the median, or see LONG_S.

    clock: for the CPU; `time.thread_time` leaves out what other programs take of it.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self.device = device
        self.clock = clock

    @cached_property
    def _busy(self) -> Tensor:
        return torch.zeros(BUSY_SIZE, BUSY_SIZE, device=self.device)

    def __call__(self, run: Callable[[], Any], budget_s: float, *, took_s: float = 0.0) -> float:
        """took_s: of a run before, if there was one."""
        if self.device.type != "cpu":
            run()  # libraries choose and build a kernel at the first call, for up to half a second
        first_s = took_s or self.once(run)
        if first_s > SLOW_S:
            return first_s if self.device.type != "cpu" else min(first_s, self.once(run))
        times = self.samples(run, budget_s)
        return min(times) if self.device.type == "cpu" and first_s > LONG_S else median(times)

    def samples(self, run: Callable[[], Any], budget_s: float) -> list[float]:
        """Run once to warm up, then until the budget is spent, at least LEAST_REPEATS times."""
        run()
        times: list[float] = []
        until = perf_counter() + budget_s
        while len(times) < LEAST_REPEATS or (len(times) < MOST_REPEATS and perf_counter() < until):
            times.append(self.once(run))
        return times

    def once(self, run: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            start = self.clock()
            run()
            return self.clock() - start
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        for _ in range(BUSY_RUNS):  # while the device does these, all that is measured is queued
            torch.mm(self._busy, self._busy)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def each_once(
    ops: Iterable[Op], signatures: Mapping[str, Hashable], budget_s: float, measure: Callable[[Op, float], T]
) -> dict[str, tuple[Op, T]]:
    """By the name of each op what was measured of the first one with its signature, and that op.

    measure: takes an op and its share of the budget, which is the same for all.
    """
    share = budget_s / max(1, len(set(signatures.values())))
    measured: dict[Hashable, tuple[Op, T]] = {}
    for op in ops:
        if (key := signatures[op.name]) not in measured:
            measured[key] = op, measure(op, share)
    return {name: measured[key] for name, key in signatures.items()}


def device_name(device: torch.device) -> str:
    """Of an accelerator what its maker calls it."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def measured_profile(graph: OpGraph, device: torch.device, costs: Mapping[str, OpCost]) -> Profile:
    return Profile(
        device=device_name(device),
        source="measured",
        graph=graph.fingerprint,
        batch=batch_text(graph.inputs),
        costs=costs,
    )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """This many CPU threads for PyTorch's kernels; afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autograd_overhead_s(timer: Timer) -> float:
    """What a call of autograd costs besides the kernels; the stage functions do not pay it."""
    x = torch.ones(1, device=timer.device, requires_grad=True)
    y = x.view(1)
    g = torch.ones_like(y)
    return timer(lambda: torch.autograd.grad(y, x, g, retain_graph=True), 0.01)


def measure_op(
    node: fx.Node,
    arguments: Mapping[fx.Node, Tensor],
    roles: Sequence[str],
    *,
    timer: Timer,
    overhead_s: float,
    budget_s: float,
) -> OpMeasurement:
    """Measure one op.

    roles: for each argument "value", "weight" or "none" (see OpArguments.role).
    overhead_s: see `autograd_overhead_s`.

    The input gradient is timed alone. The weight gradient is what both together take beyond that: a
    backward that makes both in one kernel (layer_norm, convolution) is so counted once.
    """
    tensors = list(arguments.values())
    saved: list[Tensor] = []
    with torch.enable_grad(), saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        # As when a stage is traced: dropout keeps a mask of bytes, not of numbers.
        with enable_python_dispatcher():
            results, scratch, took_s = _scratch(timer, lambda: call_node(node, arguments))
    with torch.no_grad():
        forward = timer(lambda: call_node(node, arguments), budget_s / 3, took_s=took_s)
    outputs = tensors_of(results)
    if _shares_storage(outputs, tensors):
        forward = 0.0  # a view: nothing is computed
    saved_args, saved_outputs, extra = _identify(saved, tensors, outputs)
    values = [t for t, role in zip(tensors, roles, strict=True) if role == "value"]
    weights = [t for t, role in zip(tensors, roles, strict=True) if role == "weight"]
    ends = [t for t in outputs if t.requires_grad]
    if not ends or not (values or weights):
        return OpMeasurement(forward_s=forward, transient_bytes=scratch)
    of_values_s, of_all_s, grad_scratch, passed = _measure_backward(
        ends, values, weights, timer=timer, overhead_s=overhead_s, budget_s=budget_s
    )
    learning = [i for role in ("value", "weight") for i, actual in enumerate(roles) if actual == role]
    return OpMeasurement(
        forward_s=forward,
        transient_bytes=scratch,
        saved_args=saved_args,
        saved_outputs=saved_outputs,
        extra_saved_bytes=extra,
        input_grad_s=of_values_s,
        weight_grad_s=of_all_s - of_values_s,
        grad_transient_bytes=grad_scratch,
        passed_args=tuple(i for i, own in zip(learning, passed, strict=True) if own),
    )


def _measure_backward(
    ends: list[Tensor],
    values: list[Tensor],
    weights: list[Tensor],
    *,
    timer: Timer,
    overhead_s: float,
    budget_s: float,
) -> tuple[float, float, int, list[bool]]:
    """Seconds of the gradients of values alone and of all, bytes of scratch, and of each value, then of each
    weight, whether its gradient is the output's own."""
    grads = [torch.ones_like(t, memory_format=torch.contiguous_format) for t in ends]

    def backward(targets: list[Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(ends, targets, grads, retain_graph=True, allow_unused=True)

    def seconds(targets: list[Tensor], took_s: float = 0.0) -> float:
        if not targets:
            return 0.0
        return max(0.0, timer(backward(targets), budget_s / 3, took_s=took_s) - overhead_s)

    gradients, scratch, took_s = _scratch(timer, backward([*values, *weights]))
    computed = [t for t in tensors_of(gradients) if not _shares_storage([t], grads)]
    of_values = seconds(values, 0.0 if weights else took_s) if computed else 0.0
    of_all = max(of_values, seconds([*values, *weights], took_s)) if weights and computed else of_values
    return of_values, of_all, scratch, [_shares_storage(t, grads) for t in gradients]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shares_storage(results: Any, tensors: Iterable[Tensor]) -> bool:
    storages = {_storage(t) for t in tensors}
    return any(_storage(t) in storages for t in tensors_of(results))


def _identify(
    saved: list[Tensor], arguments: list[Tensor], outputs: list[Tensor]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int]:
    """Which arguments and results the saved tensors are, and the bytes of the rest, by storage."""
    sizes = {_storage(t): t.untyped_storage().nbytes() for t in saved}
    of_args = tuple(i for i, t in enumerate(arguments) if _storage(t) in sizes)
    for i in of_args:
        sizes.pop(_storage(arguments[i]), None)
    of_outputs = tuple((i, sizes[_storage(t)]) for i, t in enumerate(outputs) if _storage(t) in sizes)
    for i, _ in of_outputs:
        sizes.pop(_storage(outputs[i]), None)
    return of_args, of_outputs, sum(sizes.values())


def _scratch(timer: Timer, run: Callable[[], Any]) -> tuple[Any, int, float]:
    """The results of a function, the most bytes alive on the way beyond those that it leaves, and on the CPU
    the seconds that it took."""
    device = timer.device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        results = run()
        torch.accelerator.synchronize(device)
        peak = torch.accelerator.max_memory_allocated(device)
        after = torch.accelerator.memory_allocated(device)
        return results, max(0, peak - max(before, after)), 0.0
    start = timer.clock()
    with LiveBytes() as alive:
        results = run()
    return results, alive.peak - alive.level, timer.clock() - start


DRAWN = 1 << 20
"""Random numbers drawn for one tensor; a larger one repeats them."""


class OpArguments:
    """Makes the arguments of ops, on one device, as they would find them in a training step.

    Shapes, strides and dtypes are those of the capture. Floating-point numbers are random between 0.1 and
    1.1, so that logarithms and roots are defined. What decides how much work an op does is real: batch inputs
    if a batch is given, constants, and what cheap ops make of them (masks, positions). Other integers are 0,
    a valid index anywhere, and other masks are true.
    batch: a real micro-batch, or nothing.
    """

    def __init__(self, captured: Captured, device: torch.device, batch: Mapping[str, Tensor]) -> None:
        self.captured = captured
        self.device = device
        self.batch = batch
        self.state = made_of_state(captured.graph)
        self.values: dict[fx.Node, Any] = {}
        self.random = torch.Generator().manual_seed(0)

    def name(self, node: fx.Node) -> str:
        """The FQN, batch input or value that a node stands for."""
        return self.captured.targets.get(node.name, node.name)

    def role(self, node: fx.Node) -> str:
        """How the gradient of an argument counts: "weight", "value", or "none" if there is none."""
        graph, name = self.captured.graph, self.name(node)
        if name in graph.parameter:
            return "weight" if graph.parameter[name].trainable else "none"
        if node.op == "placeholder" or not graph.value[name].needs_grad:
            return "none"
        return "weight" if name in self.state else "value"

    def is_state(self, node: fx.Node) -> bool:
        """Whether an argument's storage is a parameter's or buffer's, which is there anyway."""
        name = self.name(node)
        graph = self.captured.graph
        return name in graph.parameter or name in graph.buffer or name in self.state

    def of(self, node: fx.Node) -> dict[fx.Node, Tensor]:
        """One tensor per argument node; those with a gradient are leaves that require it."""
        tensors = {source: self._tensor(source) for source in dict.fromkeys(node.all_input_nodes)}
        if "grouped_mm" in str(node.target):
            _spread_groups(node, tensors)
        return {
            source: tensor.requires_grad_(self.role(source) != "none") for source, tensor in tensors.items()
        }

    def named(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by the names of parameters, buffers, batch inputs and values, none for a name that nothing
        reads; none of them requires a gradient."""
        nodes = {self.name(node): node for node in self.captured.module.graph.nodes if node.op != "output"}
        return {name: self._tensor(nodes[name]) for name in names if name in nodes}

    def _tensor(self, node: fx.Node) -> Tensor:
        real = self._real(node)
        if isinstance(real, Tensor):
            return real.detach().to(self.device, copy=True)
        return self._invented(node.meta["val"]).to(self.device)

    def _real(self, node: fx.Node) -> Any:
        """The value itself where it follows from the batch and constants by cheap ops, else None."""
        if node not in self.values:
            self.values[node] = self._evaluate(node)
        return self.values[node]

    def _evaluate(self, node: fx.Node) -> Any:
        graph, name = self.captured.graph, self.name(node)
        if node.op == "placeholder":
            real = self.captured.constants if name in self.captured.constants else self.batch
            return real.get(name)
        source = node.args[0] if node.target is getitem else node
        assert isinstance(source, fx.Node)
        if node.target is getitem:
            whole = self._real(source)
            return None if whole is None else whole[node.args[1]]
        if not graph.op[node.name].cheap:
            return None
        args = {n: self._real(n) for n in node.all_input_nodes}
        args = {n: self._invented(n.meta["val"]) if v is None else v for n, v in args.items()}
        return call_node(node, args)

    def _invented(self, like: Tensor) -> Tensor:
        """A tensor of the same layout; overlapping elements (expanded dimensions) share their number."""
        size = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True) if n > 0)
        if like.dtype == torch.bool:
            flat = torch.ones(size, dtype=torch.bool)
        elif like.dtype.is_floating_point or like.dtype.is_complex:
            flat = self._random_numbers(size).to(like.dtype)
        else:
            flat = torch.zeros(size, dtype=like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _random_numbers(self, size: int) -> Tensor:
        """Numbers of [0.1, 1), as probabilities may be, too. From the million-th on they repeat: no kernel's
        time depends on that, and to draw those of a large embedding takes longer than to measure it."""
        drawn = 0.1 + 0.9 * torch.rand(min(size, DRAWN), generator=self.random)
        return drawn if size <= DRAWN else drawn.repeat(-(-size // DRAWN))[:size]


def call_node(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Run one node on the given argument values, on the device that they are on."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    if "device" in kwargs:
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        kwargs = {**kwargs, "device": tensors[0].device if tensors else torch.device("cpu")}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _spread_groups(node: fx.Node, tensors: dict[fx.Node, Tensor]) -> None:
    """Give each expert of a grouped product an equal share of the rows: the ends of the groups."""
    rows = next(t.shape[0] for t in tensors.values() if t.ndim == 2)
    for source, tensor in tensors.items():
        if tensor.dtype == torch.int32 and tensor.ndim == 1:
            ends = torch.arange(1, len(tensor) + 1) * rows // len(tensor)
            tensors[source] = ends.to(tensor)
