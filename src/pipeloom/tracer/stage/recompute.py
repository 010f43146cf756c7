"""Which residuals a stage can make again, from what, and which it cannot.

A chain leads back from a residual to other residuals, to what the stage receives, and to parameters. It may
cross any ops but random ones, which would draw other numbers, and those that read a buffer that the forward
updates, which has another value by then. Batch normalisation in training may: it normalises by the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import fx

from ...ir.errors import PlanError
from ...ir.memory_policy import Residual, Treatment
from ..random import draws
from ..tensors import tensors_of
from .joint import Joint
from .residual_names import is_view, op_of


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
        members = chain([node], names.keys() - {node})
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
    """Raises: PlanError that names a residual of a stage's policy which it lacks or cannot recompute."""
    for name, treatment in treatments.items():
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
