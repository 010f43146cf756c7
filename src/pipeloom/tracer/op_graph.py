"""A captured fx graph -> OpGraph: names, shapes, wiring and flags, and nothing that runs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..ir.errors import CaptureError
from ..ir.graph import Buffer, Op, OpGraph, Parameter, Value
from .export import HINT
from .random import draws
from .tensors import memory_order

_HEAVY = frozenset(
    """
    mm bmm addmm baddbmm matmul linear convolution conv2d einsum scaled_dot_product_attention
    """.split()
)


def build_op_graph(
    module: fx.GraphModule,
    targets: Mapping[str, str],
    updates: Mapping[str, str],
    parameters: tuple[Parameter, ...],
    buffers: tuple[Buffer, ...],
    name: str,
) -> OpGraph:
    """Turn nodes with `meta` filled by `propagate_gradient_flow` into an OpGraph."""
    kinds = _kinds(module, targets, {p.name for p in parameters}, {b.name for b in buffers})
    loss = loss_node(module.graph).name
    _refuse_other_nodes(module, name)
    ops = tuple(
        _op(node, kinds, updates)
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is not getitem
    )
    inputs = [n for n in module.graph.find_nodes(op="placeholder") if kinds[n.name][0] == "input"]
    return OpGraph(
        name=name,
        inputs=tuple(_value(n, targets[n.name]) for n in inputs),
        ops=_mark_cheap(ops),
        parameters=parameters,
        buffers=buffers,
        loss=loss,
    )


def loss_node(graph: fx.Graph) -> fx.Node:
    """The last output of a captured graph."""
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, tuple) and isinstance(outputs[-1], fx.Node)
    return outputs[-1]


def ancestors(outputs: Iterable[fx.Node], stop: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Nodes that outputs need, themselves included; none that `stop` is true of, nor what only these need."""
    needed: set[fx.Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node not in needed and not stop(node):
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed


def _refuse_other_nodes(module: fx.GraphModule, name: str) -> None:
    for node in module.graph.nodes:
        call = node.target is getitem or isinstance(node.target, torch._ops.OpOverload)
        if not (call if node.op == "call_function" else node.op in ("placeholder", "output")):
            what = f"a {node.op} node ({node.target}), which pipeloom cannot cut"
            raise CaptureError(f"{name} contains {what}", hint=HINT)


def _kinds(
    module: fx.GraphModule, targets: Mapping[str, str], params: Container[str], buffers: Container[str]
) -> dict[str, tuple[str, str]]:
    """Placeholder name -> ("param" | "buffer" | "input", its target)."""
    kinds = {}
    for node in module.graph.find_nodes(op="placeholder"):
        target = targets[node.name]
        kind = "param" if target in params else "buffer" if target in buffers else "input"
        kinds[node.name] = (kind, target)
    return kinds


def _value(node: fx.Node, name: str | None = None) -> Value:
    val = node.meta["val"]
    assert isinstance(val, Tensor), node  # of a known size, see `program._refuse_sizes_and_numbers_of_data`
    return Value(
        name=name or node.name,
        shape=tuple(val.shape),
        dtype=str(val.dtype).removeprefix("torch."),
        needs_grad=bool(node.meta["needs_grad"]),
        order=memory_order(val),
    )


def _op(node: fx.Node, kinds: Mapping[str, tuple[str, str]], updates: Mapping[str, str]) -> Op:
    results = [u for u in node.users if u.target is getitem] or [node]
    reads: dict[str, dict[str, None]] = {"param": {}, "buffer": {}, "input": {}, "value": {}}
    for source in node.all_input_nodes:
        kind, name = kinds.get(source.name, ("value", source.name))
        reads[kind][name] = None
    call = node.target
    assert isinstance(call, torch._ops.OpOverload)  # see `_refuse_other_nodes`
    return Op(
        name=node.name,
        target=str(call),
        inputs=(*reads["input"], *reads["value"]),
        outputs=tuple(_value(r) for r in results),
        params=tuple(reads["param"]),
        buffers=tuple(reads["buffer"]),
        updates=tuple(updates[r.name] for r in results if r.name in updates),
        attributes=_attributes(node),
        module=_module_path(node),
        random=draws(node),
        view=_is_view(node, call),
    )


def _is_view(node: fx.Node, call: torch._ops.OpOverload) -> bool:
    """Whether a result lies in the storage of the first argument: a reshape may have to copy."""
    if call is torch.ops.aten.reshape.default:
        result, source = (n.meta["val"].untyped_storage()._cdata for n in (node, node.all_input_nodes[0]))
        return bool(result == source)
    return call.is_view or call is torch.ops.aten._unsafe_view.default


def _attributes(node: fx.Node) -> str:
    """The call's arguments with every tensor written as `%`: equal text means an equal call."""
    args = fx.map_arg((node.args, dict(node.kwargs)), lambda _: _HOLE)
    return repr(args)


class _Hole:
    def __repr__(self) -> str:
        return "%"


_HOLE: Any = _Hole()


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".")


def _mark_cheap(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Mark ops whose whole history is gradient-free, deterministic and light (see `Op.cheap`)."""
    updated = {name for op in ops for name in op.updates}
    cheap: set[str] = set()
    made_by = {v.name: op.name for op in ops for v in op.outputs}
    result = []
    for op in ops:
        ok = (
            not op.params
            and not op.random
            and not op.updates
            and not updated & set(op.buffers)
            and not any(v.needs_grad for v in op.outputs)
            and op.target.split(".")[1] not in _HEAVY
            and all(made_by[v] in cheap for v in op.inputs if v in made_by)
        )
        if ok:
            cheap.add(op.name)
        result.append(replace(op, cheap=ok))
    return tuple(result)


def reached(module: fx.GraphModule, targets: Mapping[str, str]) -> set[str]:
    """Names of parameters that get a gradient of the loss."""
    return {targets[n.name] for n in module.graph.find_nodes(op="placeholder") if n.meta["needs_grad"]}


def model_parameters(model: nn.Module, trained: Container[str]) -> tuple[Parameter, ...]:
    """A model's parameters, each once. trained: names of those that get a gradient."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple(
        Parameter(
            name=aliases[0],
            shape=tuple(tensors[key].shape),
            trainable=aliases[0] in trained,
            dtype=str(tensors[key].dtype).removeprefix("torch."),
            aliases=tuple(aliases[1:]),
        )
        for key, aliases in names.items()
    )


def model_buffers(model: nn.Module, constants: Mapping[str, Tensor]) -> tuple[Buffer, ...]:
    """A model's buffers, and constants as buffers that no checkpoint needs."""
    kept = set(model.state_dict(keep_vars=True))
    named = dict(model.named_buffers())
    return tuple(
        Buffer(
            name=name,
            shape=tuple(t.shape),
            dtype=str(t.dtype).removeprefix("torch."),
            persistent=name in kept and name in named,
        )
        for name, t in {**named, **constants}.items()
    )
