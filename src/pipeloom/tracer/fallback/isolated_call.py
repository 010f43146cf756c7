"""One call of a unit on its own: no autograd graph goes in or comes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..parameter_changes import refuse_new_tensor
from .intercepted_forward import output_name
from .memory_meter import CallEffects
from .recorded_run import UnitOutput
from .skeleton import ModuleUnit, Skeleton
from .torch_functions import open_up


class IsolatedCall:
    """Runs a unit on copies of what requires a gradient, and hands its results over without graph.

    leaves: flattened arguments.  outputs: tensors that it hands over, by name.  updates: buffers it changed.
    changed_attributes: names of attributes that are Python values and that it changed.
    """

    def __init__(self, skeleton: Skeleton, unit: ModuleUnit, leaves: Sequence[Any]) -> None:
        self.skeleton = skeleton
        self.unit = unit
        self.leaves = leaves
        self.arguments = [_with_graph(leaf) for leaf in leaves]
        self.outputs: dict[str, Tensor] = {}
        self.updates: tuple[str, ...] = ()
        self.changed_attributes: tuple[str, ...] = ()
        self._changed: list[int] = []
        self._new_attributes: list[tuple[str, str, Tensor]] = []
        self._flat: list[Any] = []

    def run(self, spec: TreeSpec, state: Mapping[str, Tensor], meter: CallEffects) -> TreeSpec:
        """Run it with these parameters. Returns how its result is built of leaves."""
        versions = [_version(leaf) for leaf in self.arguments]
        buffers = {n: (t, t._version) for n, t in state.items() if n not in self.skeleton.params}
        parameters = {n: (t, t.untyped_storage()._cdata) for n, t in state.items() if n not in buffers}
        with self.skeleton.using(state):
            before = {(m, a): id(t) for m, a, t in attributes(self.unit.module)}
            values = _python_values(self.unit.module)
            with meter:
                args, kwargs = tree_unflatten(self.arguments, spec)
                result = self.unit.original_forward(*args, **kwargs)
            self.updates = tuple(
                name
                for name, (tensor, version) in buffers.items()
                if _updated(self.skeleton.current(name), tensor, version, meter)
            )
            for name, (tensor, storage) in parameters.items():
                now_there = self.skeleton.current(name)
                if now_there is not tensor or tensor.untyped_storage()._cdata != storage:
                    refuse_new_tensor(name)
            self._new_attributes = [
                (m, a, t) for m, a, t in attributes(self.unit.module) if before.get((m, a)) != id(t)
            ]
            now = _python_values(self.unit.module)
            self.changed_attributes = tuple(n for n, v in now.items() if n not in values or values[n] != v)
        torch.clear_autocast_cache()
        self._changed = [i for i, leaf in enumerate(self.arguments) if _version(leaf) != versions[i]]
        open_up(result)
        self._flat, built = tree_flatten(result)
        return built

    def detached_outputs(self, call: str) -> tuple[tuple[UnitOutput, ...], list[Any]]:
        """Let go of the unit's autograd graph.

        call: name of the call, from which the names of the outputs are made.
        Returns: what other code sees of the call, and the leaves of its result.
        """
        outputs = []
        for index in self._changed:
            leaf, copy = self.leaves[index], self.arguments[index]
            if leaf is not copy:
                with torch.no_grad():
                    leaf.copy_(copy)
                leaf.requires_grad_(copy.requires_grad)
            outputs.append(self._output(f"{call}:given{index}", leaf, kind="argument", index=index))
        flat = []
        for index, leaf in enumerate(self._flat):
            source = next((i for i, g in enumerate(self.arguments) if g is leaf), None)
            if not isinstance(leaf, Tensor):
                flat.append(leaf)
            elif source is not None:
                flat.append(self.leaves[source])
                outputs.append(UnitOutput(name="", kind="same", index=index, argument=source))
            else:
                flat.append(_without_graph(leaf))
                outputs.append(self._output(output_name(call, index), flat[-1], kind="result", index=index))
        for path, attribute, tensor in self._new_attributes:
            detached = next((f for f, o in zip(flat, self._flat, strict=True) if o is tensor), None)
            detached = _without_graph(tensor) if detached is None else detached
            setattr(self.unit.module.get_submodule(path), attribute, detached)
            name = f"{call}:{path}.{attribute}" if path else f"{call}:{attribute}"
            if not any(detached is output for output in self.outputs.values()):
                outputs.append(
                    self._output(name, detached, kind="attribute", module=path, attribute=attribute)
                )
        return tuple(outputs), flat

    def _output(self, name: str, tensor: Tensor, **how: Any) -> UnitOutput:
        self.outputs[name] = tensor
        return UnitOutput(name=name, **how)


def _updated(now: Tensor, before: Tensor, version: int, meter: CallEffects) -> bool:
    """Whether a buffer has a next state. One that a gradient flows through is a result, not a state."""
    if now is not before:
        return not now.requires_grad
    return before._version != version or before.untyped_storage()._cdata in meter.statistics


def attributes(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Tensors that are plain attributes of a module or of one below: path, attribute, tensor."""
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            if isinstance(value, Tensor):
                yield path, key, value


def _python_values(module: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{key}" if path else key: value
        for path, inner in module.named_modules()
        for key, value in vars(inner).items()
        if isinstance(value, (bool, int, float, str))
    }


def _with_graph(leaf: Any) -> Any:
    """A tensor that requires a gradient is copied, as a unit may change it in place."""
    if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
        return leaf.detach().requires_grad_().clone()
    return leaf


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) else 0
