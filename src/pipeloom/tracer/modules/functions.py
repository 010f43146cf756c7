"""The functions of a stage of whole modules: autograd keeps the residuals of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from ...ir.errors import CutError
from ...ir.graph import Value
from ..autocast import Autocast, autocast_region
from ..guards import keep_attributes
from ..job import Job
from ..job_calls import evaluation_mode
from ..random import one_thread_at_a_time, seeded
from ..stage.functions import Sink, Slot, StageFunctions, Tensors
from ..tensors import ensure_unshared, storage_ids
from .absent import KEEP_TOGETHER
from .intercept import call_name
from .path import PATH_PREFIX, ForwardPath, decode_path, encode_path
from .record import LOSS
from .run import StageRun, StageTask, lack_of_data_explained
from .skeleton import ModuleUnit, Skeleton

_GRAPH = Slot("graph", "autograd")


@dataclass(eq=False)
class _Graph:
    """The autograd graph of one micro-batch.

    sink: where gradients of parameters go while it runs.  resolved: see `StageRun`.
    """

    seed: int
    state: Mapping[str, Tensor]
    received: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    resolved: Any = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    trained: list[Tensor] = field(default_factory=list)
    sink: Sink | None = None

    def add(self, name: str, leaf: Tensor) -> None:
        """A parameter's gradient is complete: hand it over, so that no two stay alive."""
        assert self.sink is not None and leaf.grad is not None
        self.sink.add(name, leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad)
        leaf.grad = None

    def clear(self) -> None:
        """Hooks of leaves refer to this object, which refers to them: cut the circle."""
        self.state, self.sink = {}, None
        for held in (self.received, self.outputs, self.grads):
            held.clear()
        self.trained.clear()
        self.resolved = {}


@dataclass(eq=False, kw_only=True)
class ModuleFunctions(StageFunctions):
    """A stage of whole modules. The backward runs autograd; split, it runs twice.

    Ranks that are threads of one process take turns: they may share the model.

    values: what crosses.  updated: buffers that the forward changes.  trainable: FQNs.
    saved_inputs: received values and batch inputs that the last forward kept for the backward.
    peaks: see `peak_bytes`; by a trial run.
    """

    job: Job
    task: StageTask
    skeleton: Skeleton
    values: Mapping[str, Value]
    updated: frozenset[str]
    trainable: frozenset[str]
    autocast: Autocast | None
    saved_inputs: frozenset[str] = frozenset()
    peaks: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        return self.peaks

    @one_thread_at_a_time
    def forward(
        self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], seed: int
    ) -> tuple[dict[str, Tensor], Tensors]:
        received = {n: inputs[n].detach().requires_grad_(self.values[n].needs_grad) for n in self.received}
        graph = _Graph(seed, {}, received)
        graph.state = self._state(state, graph)
        taken = storage_ids([*state.values(), *inputs.values()])
        saved: dict[int, Tensor] = {}
        kept: set[int] = set()

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            for storage in storage_ids([tensor]):  # none of a sparse one
                if storage in taken:
                    kept.add(storage)
                else:
                    saved[storage] = tensor
            return tensor, tensor._version

        with torch.enable_grad(), saved_tensors_hooks(pack, _unpack):
            run, outputs = self._run(graph, inputs)
            self._refuse_lost_leaves(graph)
            results = self._outputs(run, taken, self._device(inputs))
        graph.outputs = {n: t for n, t in run.bound.items() if t.requires_grad and n in self.sent}
        if run.made_loss is not None and run.made_loss.requires_grad:
            graph.outputs[LOSS] = run.made_loss
        self.saved_inputs = frozenset(n for n, t in inputs.items() if t.untyped_storage()._cdata in kept)
        if not self.differentiable:
            graph.clear()
            return results | outputs, {}
        residuals: Tensors = {Slot("residual", f"saved.{i}"): t for i, t in enumerate(saved.values())}
        return results | outputs, residuals | {_GRAPH: graph}

    def recompute(self, state: Mapping[str, Tensor], residuals: Tensors) -> Tensors:
        return {}  # autograd keeps everything

    def rehearse(
        self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], seed: int
    ) -> dict[str, Tensor]:
        """As `forward`, and nothing is kept for a backward."""
        outputs, residuals = self.forward(state, inputs, seed)
        if residuals:
            residuals[_GRAPH].clear()
        return outputs

    @one_thread_at_a_time
    def backward(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor], sink: Sink
    ) -> dict[str, Tensor]:
        graph: _Graph = residuals[_GRAPH]
        residuals.clear()
        with self._ready(graph, sink):
            names = [name for name in graph.outputs if name in grads]
            if names:
                torch.autograd.backward([graph.outputs[n] for n in names], [grads[n] for n in names])
            gradients = {name: tensor.grad for name, tensor in graph.received.items()}
            input_grads = {
                n: _to_send(grad, grads.values()) for n, grad in gradients.items() if grad is not None
            }
            graph.clear()
        return input_grads

    @one_thread_at_a_time
    def backward_input(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensors]:
        graph: _Graph = residuals[_GRAPH]
        carried = dict(residuals)
        residuals.clear()
        with self._ready(graph, None):
            names = [name for name in graph.outputs if name in grads]
            received = {n: t for n, t in graph.received.items() if t.requires_grad}
            graph.grads = {name: grads[name] for name in names}
            input_grads: dict[str, Tensor] = {}
            if names and received:
                gradients = _gradients(
                    [graph.outputs[n] for n in names], list(received.values()), graph.grads
                )
                pairs = zip(received, gradients, strict=True)
                input_grads = {n: _to_send(grad, grads.values()) for n, grad in pairs if grad is not None}
        return input_grads, carried

    @one_thread_at_a_time
    def backward_weight(self, state: Mapping[str, Tensor], carried: Tensors, sink: Sink) -> None:
        graph: _Graph = carried[_GRAPH]
        carried.clear()
        with self._ready(graph, sink):
            if graph.grads and graph.trained:
                outputs, grads = [graph.outputs[n] for n in graph.grads], list(graph.grads.values())
                some = any(tensor.requires_grad for tensor in graph.received.values())
                torch.autograd.backward(outputs, grads, inputs=graph.trained if some else None)
            graph.clear()

    @one_thread_at_a_time
    def evaluate(self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        graph = _Graph(0, {}, {n: inputs[n] for n in self.received})
        graph.state = self._cloned(state)
        with torch.no_grad(), evaluation_mode(self.skeleton.model):
            run, _ = self._run(graph, inputs, training=False)
            taken = storage_ids([*state.values(), *inputs.values()])
            return self._outputs(run, taken, self._device(inputs))

    def _device(self, inputs: Mapping[str, Tensor]) -> torch.device:
        return inputs[self.batch[0]].device

    # --- before a run -----------------------------------------------------------------------------

    def _cloned(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """State in which the forward may change buffers."""
        return {
            name: state[name].clone() if name in self.updated else state[name]
            for name in (*self.params, *self.buffers)
        }

    def _state(self, state: Mapping[str, Tensor], graph: _Graph) -> dict[str, Tensor]:
        """The same with parameters as leaves of this micro-batch's graph alone."""
        leaves = self._cloned(state)
        for name in self.params:
            leaves[name] = leaf = state[name].detach().requires_grad_(name in self.trainable)
            if name in self.trainable and self.differentiable:
                leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(graph.add, name)
                )
                graph.trained.append(leaf)
        return leaves

    def _run(
        self, graph: _Graph, inputs: Mapping[str, Tensor], *, training: bool = True
    ) -> tuple[StageRun, dict[str, Tensor]]:
        """Run the forward. Returns also the buffers that changed, as `buffer:FQN`."""
        device = self._device(inputs)
        later = self.task.recording.changed_later
        batch = {n: inputs[n].clone() if f"batch:{n}" in later else inputs[n] for n in self.batch}
        received = {
            name: tensor.clone() if name in later else tensor
            for name, tensor in graph.received.items()
            if not name.startswith(PATH_PREFIX)
        }
        paths = [decode_path(inputs[n]) for n in self.received if n.startswith(PATH_PREFIX)]
        earlier_path = max(paths, key=lambda path: len(path.calls), default=ForwardPath())
        run = StageRun(
            self.skeleton,
            self.task,
            received=received,
            earlier_path=earlier_path,
            seed=graph.seed,
            device=device,
            training=training,
        )
        cast = autocast_region(self.autocast, run_on=device.type)
        with self._own_attributes(), self.skeleton.using(graph.state), cast:
            with lack_of_data_explained(self.task):
                run.run(self.job, batch)
            graph.resolved = run.resolved
            now = {name: self.skeleton.current(name) for name in self.buffers}
        self.skeleton.rest(self.skeleton.attributes)  # where units of other stages left theirs
        changed = {
            f"buffer:{name}": tensor.detach()
            for name, tensor in now.items()
            if name in self.updated or (tensor is not graph.state[name] and not tensor.requires_grad)
        }
        return run, changed

    def _refuse_lost_leaves(self, graph: _Graph) -> None:
        """A user's own function mode can hide autograd functions, which then take over what they return."""
        for name, tensor in graph.received.items():
            if not tensor.is_leaf or tensor.requires_grad != self.values[name].needs_grad:
                raise CutError(f"{name} is made by an autograd function between modules", hint=KEEP_TOGETHER)

    # --- after a run ------------------------------------------------------------------------------

    def _outputs(self, run: StageRun, taken: set[int], device: torch.device) -> dict[str, Tensor]:
        """What is sent, and the loss, each with a storage of its own and without graph."""
        outputs = {}
        for name in self.sent:
            value = self.values[name]
            if name.startswith(PATH_PREFIX):
                outputs[name] = encode_path(run.path, value, device)
            elif name in run.bound:
                outputs[name] = _checked(run.bound[name], value)
            else:
                outputs[name] = _never_read(value, device)
        if run.made_loss is not None:
            outputs[LOSS] = run.made_loss
        unavailable = set(taken)
        return {name: ensure_unshared(tensor.detach(), (), unavailable) for name, tensor in outputs.items()}

    @contextmanager
    def _ready(self, graph: _Graph, sink: Sink | None) -> Iterator[None]:
        """Activation checkpointing runs units again in the backward: with the same state and seeds."""

        def rerun(unit: ModuleUnit, args: Any, kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, lambda leaf: graph.resolved.get(leaf, leaf), (args, kwargs))
            calls = [call for call in self.task.recording.calls if call.unit == unit.fqn]
            if not any(call.random for call in calls):
                return unit.original_forward(*args, **kwargs)
            if len(calls) > 1:
                raise CutError(
                    f"{unit.fqn} draws random numbers, is called more than once and checkpointed as a whole",
                    hint="checkpoint inside the module, or call it once",
                )
            with seeded(graph.seed, call_name(unit.fqn, 0)):
                return unit.original_forward(*args, **kwargs)

        graph.sink = sink
        self.skeleton.rerun = rerun
        try:
            with self._own_attributes(), self.skeleton.using(graph.state):
                yield
        finally:
            self.skeleton.rerun = None

    @contextmanager
    def _own_attributes(self) -> Iterator[None]:
        """Where the skeleton keeps ranks apart, attributes have the values that this stage's has left."""
        if not self.skeleton.ranks:
            yield
            return
        rank = self.skeleton.ranks[self.index]
        self.skeleton.left[rank]()
        yield
        self.skeleton.left[rank] = keep_attributes(self.skeleton.model)


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """A saved tensor. PyTorch makes this check itself only where no hooks are."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that the backward needs was changed in place "
            f"(version {tensor._version}, saved as {version})"
        )
    return tensor


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Mapping[str, Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of the inputs; the graph stays for the other ones."""
    try:
        return torch.autograd.grad(
            outputs, inputs, list(grads.values()), retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise CutError(
            "reentrant activation checkpointing cannot compute input gradients alone",
            hint="checkpoint with use_reentrant=False, or take a schedule that does not split the backward",
        ) from error


def _checked(tensor: Tensor, value: Value) -> Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != value.shape or dtype != value.dtype:
        raise CutError(
            f"{value.name} is {dtype}{list(tensor.shape)}, and was {value.dtype}{list(value.shape)} when "
            "captured: a tensor whose size depends on data cannot be sent to another stage",
            hint=KEEP_TOGETHER,
        )
    if tensor.requires_grad and not value.needs_grad:
        raise CutError(
            f"{value.name} requires a gradient, and did not when captured: it would be lost on the way back",
            hint=KEEP_TOGETHER,
        )
    return tensor


def _never_read(value: Value, device: torch.device) -> Tensor:
    """For a value that the forward, on the way it took, does not make: NaN shows if it is read after all."""
    dtype = getattr(torch, value.dtype)
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(value.shape, fill, dtype=dtype, device=device)


def _to_send(grad: Tensor, incoming: Iterable[Tensor]) -> Tensor:
    """A gradient to send: dense, and not the very tensor that came in."""
    return ensure_unshared(grad.detach(), (), storage_ids(incoming))
