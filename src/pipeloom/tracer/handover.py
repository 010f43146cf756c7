"""A captured model as bytes: one process captures, the ranks that it starts take it over and trace no more.

What crosses is the captured graph, node by node. The model itself does not: a rank makes it from its own job,
on fake tensors, which takes a small part of the time that exporting takes. The bytes are a pickle, and so
for processes that trust each other: they go through pipes and process groups, and never into a file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only

from ..ir.errors import CaptureError
from ..ir.graph import OpGraph
from .blueprint import Blueprint, make_blueprint
from .captured import Captured
from .job import Job
from .tracing_lock import one_thread_at_a_time


class NodeName(NamedTuple):
    """A node among the arguments of another."""

    node: str


class HandedTensor(NamedTuple):
    """A fake tensor: how it looks at which storage. Tensors with one number share their memory."""

    storage: int
    storage_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class HandedNode(NamedTuple):
    """A node of the captured graph, as `torch.fx` makes one."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    val: Any
    requires_grad: bool
    needs_grad: bool


class HandedGraph(NamedTuple):
    """A `Captured` without its blueprint. made: tensors that the constructor made and that are neither
    parameters nor buffers, by name."""

    graph: OpGraph
    nodes: tuple[HandedNode, ...]
    targets: Mapping[str, str]
    updates: Mapping[str, str]
    constants: Mapping[str, Tensor]
    autocast: torch.dtype | None
    made: tuple[str, ...]


@one_thread_at_a_time
def hand_over(captured: Captured) -> bytes | None:
    """What `take_over` needs of a captured model, without its evaluation mode.

    Returns: None for a model that is handed over by its job alone, so that each rank captures it: one that
        is cut between its modules, or with a part that cannot be handed over.
    """
    if captured.cut is not None:
        return None
    return _handed_bytes(captured)


@one_thread_at_a_time
def hand_over_evaluation(captured: Captured) -> bytes | None:
    """What `take_over_evaluation` needs of a captured model whose evaluation mode was captured, too.

    Returns: None as `hand_over` does, and where it was not captured.
    """
    return None if captured.evaluation is None else _handed_bytes(captured.evaluation)


def _handed_bytes(captured: Captured) -> bytes | None:
    if any(_attribute(captured.blueprint, name) is None for name in captured.blueprint.attribute_tensors):
        return None  # a tensor in a list, say: nothing says where the rank's own model has it
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(_handed(captured))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return None  # an argument of a call that Python cannot pickle, such as an object of a user's library
    return buffer.getvalue()


@one_thread_at_a_time
def take_over(data: bytes, job: Job) -> Captured:
    """The captured model that another process handed over.

    Raises: CaptureError if this process's job makes another model than that one was captured from.
    """
    handed: HandedGraph = _Unpickler(io.BytesIO(data)).load()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    blueprint = make_blueprint(job.model, fake)
    _require_same_model(handed.graph, blueprint, job)
    return _captured(handed, blueprint, fake, job)


@one_thread_at_a_time
def take_over_evaluation(data: bytes, captured: Captured, job: Job) -> None:
    """Give a model that was taken over its evaluation mode. Raises: CaptureError as `take_over` does."""
    handed: HandedGraph = _Unpickler(io.BytesIO(data)).load()
    fake = detect_fake_mode([node.meta.get("val") for node in captured.module.graph.nodes])
    assert fake is not None, "every captured graph has a tensor"
    captured.evaluation = _captured(handed, captured.blueprint, fake, job)


_HINT = "let Job.model make the same model in every process"


def _require_same_model(graph: OpGraph, blueprint: Blueprint, job: Job) -> None:
    here = {name: tuple(p.shape) for name, p in blueprint.model.named_parameters(remove_duplicate=False)}
    for parameter in graph.parameters:
        for name in (parameter.name, *parameter.aliases):
            if here.pop(name, None) != parameter.shape:
                raise CaptureError(
                    f"{job.name} was captured with a parameter {name} of shape {parameter.shape}, which the "
                    "model in this process lacks",
                    hint=_HINT,
                )
    if here:
        raise CaptureError(
            f"{job.name} was captured without the parameter {next(iter(here))} of the model in this process",
            hint=_HINT,
        )


def _attribute(blueprint: Blueprint, name: str) -> Tensor | None:
    """The tensor that a model holds under this name, if any."""
    value: Any = blueprint.model
    for part in name.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, Tensor) else None


def _handed(captured: Captured) -> HandedGraph:
    return HandedGraph(
        graph=captured.graph,
        nodes=tuple(
            HandedNode(
                op=node.op,
                name=node.name,
                target=node.target,
                args=fx.map_arg(node.args, _node_name),
                kwargs=fx.map_arg(dict(node.kwargs), _node_name),
                val=tree_map_only(Tensor, _handed_tensor, node.meta.get("val")),
                requires_grad=bool(node.meta.get("requires_grad", False)),
                needs_grad=bool(node.meta.get("needs_grad", False)),
            )
            for node in captured.module.graph.nodes
        ),
        targets=dict(captured.targets),
        updates=dict(captured.updates),
        constants=dict(captured.constants),
        autocast=captured.autocast,
        made=tuple(captured.blueprint.attribute_tensors),
    )


def _node_name(node: fx.Node) -> Any:
    return NodeName(node.name)


def _handed_tensor(tensor: Tensor) -> HandedTensor:
    storage = tensor.untyped_storage()
    return HandedTensor(
        storage=int(storage._cdata),
        storage_bytes=storage.nbytes(),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
    )


def _captured(handed: HandedGraph, blueprint: Blueprint, fake: FakeTensorMode, job: Job) -> Captured:
    for name in handed.made:
        attribute = _attribute(blueprint, name)
        if attribute is None:
            raise CaptureError(f"the model of {job.name} has no {name} here", hint=_HINT)
        blueprint.attribute_tensors[name] = attribute
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    made = _fake_tensors(fake)

    def argument(leaf: Any) -> Any:
        return nodes[leaf.node] if isinstance(leaf, NodeName) else leaf

    for each in handed.nodes:
        args = tree_map(argument, each.args, is_leaf=_is_name)
        kwargs = tree_map(argument, each.kwargs, is_leaf=_is_name)
        node = graph.create_node(each.op, each.target, args, kwargs, name=each.name)
        assert node.name == each.name, "the captured graph had this name, too"
        node.meta = {"requires_grad": each.requires_grad, "needs_grad": each.needs_grad}
        if each.op != "output":
            node.meta["val"] = tree_map(made, each.val, is_leaf=_is_tensor)
        nodes[node.name] = node
    return Captured(
        graph=handed.graph,
        module=fx.GraphModule({}, graph),
        targets=handed.targets,
        updates=handed.updates,
        blueprint=blueprint,
        constants=handed.constants,
        autocast=handed.autocast,
    )


def _is_name(leaf: object) -> bool:
    return isinstance(leaf, NodeName)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, HandedTensor)


def _fake_tensors(fake: FakeTensorMode) -> Callable[[Any], Any]:
    """HandedTensor -> a fake tensor that shares its storage with others as the original did."""
    storages: dict[int, Tensor] = {}

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, HandedTensor):
            return leaf
        with fake:
            if leaf.storage not in storages:
                storages[leaf.storage] = torch.empty(leaf.storage_bytes, dtype=torch.uint8)
            look = torch.empty(0, dtype=leaf.dtype)
            return look.set_(storages[leaf.storage].untyped_storage(), leaf.offset, leaf.shape, leaf.stride)

    return make


class _Pickler(pickle.Pickler):
    """Writes ATen calls by their names."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            return obj._schema.name, obj._overloadname
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        name, overload = pid
        namespace, _, call = name.partition("::")
        return getattr(getattr(getattr(torch.ops, namespace), call), overload)
