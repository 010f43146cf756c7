"""Residuals: their names, and which of them a stage can make again, from what.

They are named as `ir.memory_policy` has them: by the op of the graph that made the tensor. A view is never
one: the tensor that owns its storage is.

A chain leads back from a residual to other residuals, to what the stage receives, and to parameters. It may
cross any ops but random ones, which would draw other numbers, and those that read a buffer that the forward
updates, which has another value by then. Batch normalisation in training may: it normalises by the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ...ir.errors import PlanError
from ...ir.memory_policy import Residual, Treatment
from ..op_graph import ancestors
from ..random import draws
from ..tensors import tensors_of
from .joint import Joint

_VIEWS_BY_CONVENTION = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.reshape.default,  # in a joint graph, see `simplify`
}


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares the storage of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if node.target in _VIEWS_BY_CONVENTION:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def storage_owner(node: fx.Node) -> fx.Node:
    """The node that owns the storage of `node`'s result."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


_COPY = "sent:"
"""In front of the name of what no op of the graph made: a copy that a stage makes of what it sends."""


def residual_names(joint: Joint, forward: Container[fx.Node]) -> dict[fx.Node, str]:
    """Name the tensors of the forward that own their storage."""
    nodes_of_op: dict[str, list[fx.Node]] = defaultdict(list)
    for node in joint.graph.nodes:
        if node in forward and node.op == "call_function":
            nodes_of_op[_origin(node).get("op", _COPY)].append(node)
    sent = set(joint.outputs.values())
    names: dict[fx.Node, str] = {}
    for op, nodes in nodes_of_op.items():
        owners = [node for node in nodes if not is_view(node) and isinstance(node.meta.get("val"), Tensor)]
        if op == _COPY:
            names |= {node: f"{_COPY}{node.name}" for node in owners}
            continue
        results = _origin(nodes[0])["results"]
        places = _of_several(nodes, results) if results else {_only_result(nodes, forward, sent): 0}
        further = max(1, len(results))
        for node in owners:
            if node not in places:
                places[node] = further
                further += 1
            names[node] = f"{op}.{places[node]}" if places[node] else op
    return names


def op_of(node: fx.Node) -> str:
    """The op of the captured graph that a joint graph's node comes from."""
    return str(_origin(node).get("op", node.name))


def _origin(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _only_result(nodes: list[fx.Node], forward: Container[fx.Node], sent: Container[fx.Node]) -> fx.Node:
    """The owner of an op's result: what other ops read of its tensors, of several the last."""
    inside = set(nodes)
    read = [
        node
        for node in nodes
        if node in sent or any(user in forward and user not in inside for user in node.users)
    ]
    return storage_owner((read or nodes)[-1])


def _of_several(nodes: list[fx.Node], results: tuple[Any, ...]) -> dict[fx.Node, int]:
    """Results of an op that has several -> their positions among those that the graph uses."""
    calls = [node for node in nodes if not isinstance(node.meta.get("val"), Tensor)]
    return {
        node: results.index(node.args[1])
        for node in nodes
        if node.target is getitem and node.args[0] is calls[-1] and node.args[1] in results
    }


def chain(lost: Collection[fx.Node], kept: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes that run again to make `lost` from `kept` and placeholders."""
    return ancestors(lost, lambda node: node.op == "placeholder" or node in kept)


def describe_residuals(
    joint: Joint, names: Mapping[fx.Node, str], state: frozenset[str], updated: frozenset[str]
) -> dict[str, Residual]:
    """Residuals by name: how large each is, and from what it can be made again.

    names: node of each residual -> its name.  state, updated: see `split.Splitter`.
    """
    place = {node: index for index, node in enumerate(joint.graph.nodes)}
    residuals = {}
    for node, name in names.items():

        def other(n: fx.Node, node: fx.Node = node) -> bool:
            return n.op == "placeholder" or (n in names and n is not node)

        members = ancestors([node], other)
        ordered = sorted(members, key=place.__getitem__)
        read = dict.fromkeys(s for member in ordered for s in member.all_input_nodes if s not in members)
        inputs = {source: joint.inputs[source] for source in read if source in joint.inputs}
        sources = [names[source] for source in read if source in names]
        size = sum(t.untyped_storage().nbytes() for t in tensors_of(node.meta["val"]))
        residuals[name] = Residual(
            name=name,
            bytes=size,
            ops=tuple(dict.fromkeys(op_of(n) for n in ordered if not is_view(n))),
            sources=(*sources, *(f"input:{n}" for n in inputs.values() if n not in state)),
            obstacle=_obstacle(ordered, {s: n for s, n in inputs.items() if n in updated}),
        )
    return residuals


def _obstacle(members: list[fx.Node], buffers: Mapping[fx.Node, str]) -> str:
    for node in members:
        if draws(node):
            return f"{op_of(node)} draws random numbers"
        if not _normalises_by_the_batch(node):
            for buffer in buffers.keys() & node.all_input_nodes:
                return f"{op_of(node)} reads buffer {buffers[buffer]}, which the forward updates"
    return ""


def _normalises_by_the_batch(node: fx.Node) -> bool:
    """Whether what a node makes, but for the next statistics, does not depend on those that it reads."""
    training = 5  # its place among the arguments
    return node.target is _BATCH_NORM and node.args[training] is True


_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def require_possible(
    stage: int, treatments: Mapping[str, Treatment], residuals: Mapping[str, Residual]
) -> None:
    """A further result of one of the stage's ops may be missing: what kernels keep, as that of attention,
    differs from device to device, and the plan may have been made for another one.

    Raises: PlanError that names a residual of a stage's policy which it lacks or cannot recompute.
    """
    ops = {name.partition(".")[0] for name in residuals}
    for name, treatment in treatments.items():
        op, further, _ = name.partition(".")
        if further and op in ops and name not in residuals:
            continue
        if name not in residuals:
            raise PlanError(
                f"the plan is to {treatment} residual {name} of stage {stage}, which has none of that name",
                hint=f"plan again for this model; the stage has {_listed(list(residuals))}",
            )
        if treatment == "recompute" and residuals[name].obstacle:
            raise PlanError(
                f"residual {name} of stage {stage} cannot be recomputed: {residuals[name].obstacle}",
                hint=f"keep or offload {name}",
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") or "no residuals"
