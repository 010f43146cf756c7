"""A captured model as bytes: one process captures, the ranks that it starts take it over and trace no more.

What crosses is the captured graph, node by node. The model itself does not: a rank makes it from its own job,
on fake tensors, which takes a small part of the time that exporting takes. The bytes are a pickle, and so
for processes that trust each other: they go through pipes and process groups, and never into a file.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..ir.errors import CaptureError
from ..ir.graph import OpGraph
from .blueprint import Blueprint, make_blueprint
from .captured import Captured
from .job import Job
from .random import one_thread_at_a_time
from .tensors import StorageView


@one_thread_at_a_time
def hand_over(captured: Captured | None) -> bytes | None:
    """What `take_over` needs of a captured model, or `take_over_evaluation` of its evaluation mode.

    Returns: None where nothing was captured, and for a model that is handed over by its job alone, so that
        each rank captures it: one that is cut between its modules, or with a part that cannot be handed over.
    """
    if captured is None or captured.cut is not None:
        return None
    if any(_attribute(captured.blueprint, name) is None for name in captured.blueprint.attribute_tensors):
        return None  # a tensor in a list, say: nothing says where the rank's own model has it
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    nodes = list(captured.module.graph.nodes)
    try:
        pickler.dump({name: getattr(captured, name) for name in _FIELDS})
        pickler.dump((list(captured.blueprint.attribute_tensors), len(nodes)))
        for node in nodes:
            meta = {name: node.meta[name] for name in _META if name in node.meta}
            pickler.dump((node.op, node.target, node.args, dict(node.kwargs), node.name, meta))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return None  # an argument of a call that Python cannot pickle, such as an object of a user's library
    return buffer.getvalue()


@one_thread_at_a_time
def take_over(data: bytes, job: Job) -> Captured:
    """The captured model that another process handed over.

    Raises: CaptureError if this process's job makes another model than that one was captured from.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    blueprint = make_blueprint(job.model, fake)
    captured = _captured(data, blueprint, fake, job)
    _require_same_model(captured.graph, blueprint, job)
    return captured


@one_thread_at_a_time
def take_over_evaluation(data: bytes, captured: Captured, job: Job) -> None:
    """Give a model that was taken over its evaluation mode. Raises: CaptureError as `take_over` does."""
    fake = detect_fake_mode([node.meta.get("val") for node in captured.module.graph.nodes])
    assert fake is not None, "every captured graph has a tensor"
    captured.evaluation = _captured(data, captured.blueprint, fake, job)


_HINT = "let Job.model make the same model in every process"


def _require_same_model(graph: OpGraph, blueprint: Blueprint, job: Job) -> None:
    here = {name: tuple(p.shape) for name, p in blueprint.model.named_parameters(remove_duplicate=False)}
    there = {
        name: p.shape if p.rows is None else (p.rows.of, *p.shape[1:])
        for p in graph.parameters
        for name in (p.own_name, *p.aliases)
    }
    if (odd := next((n for n in there | here if here.get(n) != there.get(n)), None)) is not None:
        was, now = (f"of shape {shapes[odd]}" if odd in shapes else "absent" for shapes in (there, here))
        raise CaptureError(
            f"parameter {odd} of {job.name} was {was} when captured, and in this process it is {now}",
            hint=_HINT,
        )


def _attribute(blueprint: Blueprint, name: str) -> Tensor | None:
    """The tensor that a model holds under this name, if any."""
    value: Any = blueprint.model
    for part in name.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, Tensor) else None


def _captured(data: bytes, blueprint: Blueprint, fake: FakeTensorMode, job: Job) -> Captured:
    unpickler = _Unpickler(io.BytesIO(data), fake)
    fields = unpickler.load()
    made, count = unpickler.load()
    for name in made:
        attribute = _attribute(blueprint, name)
        if attribute is None:
            raise CaptureError(f"the model of {job.name} has no {name} here", hint=_HINT)
        blueprint.attribute_tensors[name] = attribute
    graph = fx.Graph()
    for _ in range(count):
        op, target, args, kwargs, name, meta = unpickler.load()
        node = unpickler.nodes[name] = graph.create_node(op, target, args, kwargs, name=name)
        assert node.name == name, "the captured graph had this name, too"
        node.meta = meta
    return Captured(module=fx.GraphModule({}, graph), blueprint=blueprint, **fields)


_FIELDS = ("graph", "targets", "updates", "constants", "autocast", "split_words")
_META = ("val", "requires_grad", "needs_grad")


class _Pickler(pickle.Pickler):
    """Writes ATen calls and nodes by their names, and fake tensors as views of numbered storages."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            return "call", obj._schema.name, obj._overloadname
        if isinstance(obj, fx.Node):
            return "node", obj.name
        if isinstance(obj, FakeTensor):
            return "tensor", StorageView.of(obj), obj.untyped_storage().nbytes()
        return None


class _Unpickler(pickle.Unpickler):
    """nodes: those that were made so far, by name."""

    def __init__(self, data: io.BytesIO, fake: FakeTensorMode) -> None:
        super().__init__(data)
        self.nodes: dict[str, fx.Node] = {}
        self._fake = fake
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, *what = pid
        if kind == "node":
            return self.nodes[what[0]]
        if kind == "tensor":
            return self._tensor(*what)
        name, overload = what
        namespace, _, call = name.partition("::")
        return getattr(getattr(getattr(torch.ops, namespace), call), overload)

    def _tensor(self, view: StorageView, size: int) -> Tensor:
        with self._fake:
            if view.storage not in self._storages:
                self._storages[view.storage] = torch.empty(size, dtype=torch.uint8).untyped_storage()
            return view.on(self._storages[view.storage])
