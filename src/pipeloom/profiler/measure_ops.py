"""A profile measured on this machine: every distinct op of a captured graph, run alone.

Ops with equal signature (target, attributes, layout of every tensor, which of them have gradients) are
measured once. Each gets an equal share of the time budget, and at least three runs after a warm-up; the
median counts. What is measured is the op's own kernels: not the interpreter around them, no transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from operator import getitem
from time import perf_counter

import torch
from torch import Tensor, fx

from ..ir.graph import Op, OpGraph, storages
from ..ir.profile import OpCost, Profile, batch_text
from .gradient_order import gradient_order
from .measure_op import OpMeasurement, Timer, autograd_overhead_s, measure_op
from .op_arguments import Captured, OpArguments


def measure(
    captured: Captured,
    device: str = "cpu",
    *,
    batch: Mapping[str, Tensor] | None = None,
    budget_s: float = 6.0,
    threads: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> Profile:
    """Measure the costs of every op.

    device: where to run, "cpu" or "cuda".  batch: a real micro-batch, for the range of its integers.
    budget_s: time to spend in all; ops so slow that three runs take longer get them all the same.
    threads: CPU threads, as many as each rank will have.  clock: see `Timer`.
    """
    where = torch.device(device)
    arguments = OpArguments(captured, where, batch or {})
    nodes = {node.name: node for node in captured.module.graph.nodes}
    signatures = {op.name: _signature(nodes[op.name], arguments) for op in captured.graph.ops}
    share = budget_s / max(1, len(set(signatures.values())))
    timer = Timer(where, clock)
    measured: dict[Hashable, OpMeasurement] = {}
    with (
        _threads(threads),
        torch.autocast(
            where.type, dtype=captured.autocast or torch.bfloat16, enabled=captured.autocast is not None
        ),
    ):
        engine = autograd_overhead_s(timer)
        for op in captured.graph.ops:
            if signatures[op.name] not in measured:
                node = nodes[op.name]
                made = arguments.of(node)
                roles = [arguments.role(source) for source in made]
                try:
                    kernel = measure_op(node, made, roles, timer=timer, engine=engine, budget_s=share)
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    error.add_note(f"while measuring op {op.name} ({op.target}) of {captured.graph.name}")
                    raise
                measured[signatures[op.name]] = kernel
    base = storages(captured.graph)
    costs = {
        op.name: _cost(op, captured.graph, nodes[op.name], measured[signatures[op.name]], arguments, base)
        for op in captured.graph.ops
    }
    return Profile(
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        source="measured",
        graph=captured.graph.fingerprint,
        batch=batch_text(captured.graph.inputs),
        costs=costs,
    )


def _signature(node: fx.Node, arguments: OpArguments) -> Hashable:
    order = {source: index for index, source in enumerate(dict.fromkeys(node.all_input_nodes))}
    layout = tuple(_layout(source, arguments) for source in order)
    call = repr(fx.map_arg((node.args, dict(node.kwargs)), lambda n: _Place(order[n])))
    return str(node.target), call, layout


class _Place(str):
    """The position of a tensor among an op's arguments."""

    def __new__(cls, index: int) -> _Place:
        return super().__new__(cls, f"%{index}")


def _layout(node: fx.Node, arguments: OpArguments) -> Hashable:
    val = node.meta["val"]
    return tuple(val.shape), val.stride(), val.dtype, arguments.role(node)


def _cost(
    op: Op,
    graph: OpGraph,
    node: fx.Node,
    kernel: OpMeasurement,
    arguments: OpArguments,
    base: Mapping[str, str],
) -> OpCost:
    """A kernel's measurements under the names of one of the ops that it stands for. The order of gradients is
    that of the table: alone, an op lets go of nothing."""
    if not any(value.needs_grad for value in op.outputs):
        return OpCost(forward_s=kernel.forward_s, transient_bytes=kernel.transient_bytes)
    sources = list(dict.fromkeys(node.all_input_nodes))
    saves = {
        base[arguments.name(sources[i])]: None
        for i in kernel.saved_args
        if not arguments.is_state(sources[i])
    }
    results = {user.args[1]: user.name for user in node.users if user.target is getitem} or {0: node.name}
    extra = kernel.extra_saved_bytes
    for position, size in kernel.saved_outputs:
        if position in results:
            saves[base[results[position]]] = None
        else:
            extra += size
    order = gradient_order(op, graph, base, tuple(saves))
    return OpCost(
        forward_s=kernel.forward_s,
        input_grad_s=kernel.input_grad_s,
        weight_grad_s=kernel.weight_grad_s,
        saves=tuple(saves),
        extra_saved_bytes=extra,
        transient_bytes=kernel.transient_bytes,
        grad_transient_bytes=kernel.grad_transient_bytes,
        passes=tuple(arguments.name(sources[i]) for i in kernel.passed_args),
        adds=order.adds,
        lets_go=order.lets_go,
        grad_first_bytes=order.first,
        grad_rest_bytes=order.rest,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
