"""A profile measured on this machine: every distinct op of a captured graph, run alone.

Ops with equal signature (target, attributes, layout of every tensor, which of them have gradients) are
measured once. Each gets an equal share of the time budget, and at least three runs after a warm-up; the
median counts. What is measured is the op's own kernels: not the interpreter around them, no transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from operator import getitem
from time import perf_counter

import torch
from torch import Tensor, fx

from ..ir.errors import CaptureError
from ..ir.graph import Op, OpGraph, storages
from ..ir.profile import OpCost, Profile
from ..tracer.captured import Captured
from .gradient_order import gradient_order
from .measure_op import (
    OpArguments,
    OpMeasurement,
    Timer,
    autograd_overhead_s,
    each_once,
    measure_op,
    measured_profile,
    torch_threads,
)


def measure(
    captured: Captured,
    device: str = "cpu",
    *,
    batch: Mapping[str, Tensor] | None = None,
    budget_s: float = 3.0,
    clock: Callable[[], float] = perf_counter,
) -> Profile:
    """Measure the costs of every op, with one CPU thread, as each rank will have.

    device: where to run, "cpu" or "cuda".  batch: a real micro-batch, for the range of its integers.
    budget_s: time to spend in all; ops too slow for three runs of their share get them all the same, those
    of more than `SLOW_S` two.
    clock: see `Timer`.

    Raises: CaptureError if an op fails.
    """
    where = torch.device(device)
    arguments = OpArguments(captured, where, batch or {})
    nodes = {node.name: node for node in captured.module.graph.nodes}
    timer = Timer(where, clock)

    def measured(op: Op, share_s: float) -> OpMeasurement:
        node = nodes[op.name]
        tensors = arguments.of(node)
        roles = [arguments.role(source) for source in tensors]
        try:
            return measure_op(node, tensors, roles, timer=timer, overhead_s=overhead_s, budget_s=share_s)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            where = f"{op.target} in {op.module or 'the forward'} of {captured.graph.name}"
            raise CaptureError(
                f"{where} fails on a batch: {type(error).__name__}: {error}",
                hint="dtypes and the range of integers are seen only now: call the model with "
                "Job.batch(0, 1) in plain PyTorch",
            ) from error

    with torch_threads(1):
        overhead_s = autograd_overhead_s(timer)
        found = each_once(captured.graph.ops, op_signatures(captured), budget_s, measured)
    base = storages(captured.graph)
    costs = {
        op.name: _cost(op, captured.graph, nodes[op.name], found[op.name][1], arguments, base)
        for op in captured.graph.ops
    }
    return measured_profile(captured.graph, where, costs)


def op_signatures(captured: Captured) -> dict[str, Hashable]:
    """What the time of each op depends on, by the op's name: the call and the layouts of its tensors."""
    arguments = OpArguments(captured, torch.device("cpu"), {})
    nodes = {node.name: node for node in captured.module.graph.nodes}

    def layout(node: fx.Node) -> Hashable:
        val = node.meta["val"]
        return tuple(val.shape), val.stride(), val.dtype, arguments.role(node)

    def signature(node: fx.Node) -> Hashable:
        order = {source: index for index, source in enumerate(dict.fromkeys(node.all_input_nodes))}
        call = repr(fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{order[n]}"))
        return str(node.target), call, tuple(map(layout, order))

    return {op.name: signature(nodes[op.name]) for op in captured.graph.ops}


def _cost(
    op: Op,
    graph: OpGraph,
    node: fx.Node,
    measurement: OpMeasurement,
    arguments: OpArguments,
    base: Mapping[str, str],
) -> OpCost:
    """A kernel's measurements under the names of one of the ops that it stands for. The order of gradients is
    that of the table: alone, an op lets go of nothing."""
    if not any(value.needs_grad for value in op.outputs):
        return OpCost(forward_s=measurement.forward_s, transient_bytes=measurement.transient_bytes)
    sources = list(dict.fromkeys(node.all_input_nodes))
    saves = {
        base[arguments.name(sources[i])]: None
        for i in measurement.saved_args
        if not arguments.is_state(sources[i])
    }
    results = {user.args[1]: user.name for user in node.users if user.target is getitem} or {0: node.name}
    extra = measurement.extra_saved_bytes
    for position, size in measurement.saved_outputs:
        if position in results:
            saves[base[results[position]]] = None
        else:
            extra += size
    order = gradient_order(op, graph, base, tuple(saves))
    return OpCost(
        forward_s=measurement.forward_s,
        input_grad_s=measurement.input_grad_s,
        weight_grad_s=measurement.weight_grad_s,
        saves=tuple(saves),
        extra_saved_bytes=extra,
        transient_bytes=measurement.transient_bytes,
        grad_transient_bytes=measurement.grad_transient_bytes,
        passes=tuple(arguments.name(sources[i]) for i in measurement.passed_args),
        **order._asdict(),
    )
