"""Looking at what each action makes: for a user's hook, and for the first number that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from .ir.errors import NumbersError
from .ir.stages import StageGraph
from .tracer.captured import Captured
from .tracer.stage.joint import extract
from .tracer.tensors import tensors_of

OnAction: TypeAlias = Callable[[str, Mapping[str, Tensor]], None]
"""Gets the text of an action that has run, as "1F0", and the tensors that it made, by name."""


@dataclass(frozen=True)
class Look:
    """Called after each F, B, I and W of a rank.

    captured, stages: for the op in which a forward went wrong.
    """

    captured: Captured
    stages: StageGraph
    on_action: OnAction | None
    find_nan: bool

    def __call__(
        self,
        text: str,
        stage: int,
        made: Mapping[str, Tensor],
        *,
        state: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor] | None = None,
    ) -> None:
        """state: parameters and buffers.  inputs: of a forward.

        Raises: NumbersError if a number was made that is not finite, and one is looked for.
        """
        if self.on_action is not None:
            self.on_action(text, made)
        if not self.find_nan or not (bad := [name for name, tensor in made.items() if not _finite(tensor)]):
            return
        where = None if inputs is None else self._first_op(self.stages.origin(stage), state, inputs)
        if given := [name for name, tensor in (inputs or {}).items() if not _finite(tensor)]:
            where = f"its input {given[0]}"
        elif weights := [name for name, tensor in state.items() if not _finite(tensor)]:
            where = f"{weights[0]}, which is read"
        raise NumbersError(
            f"{bad[0]} is not finite after {text} on stage {stage}"
            + (f"; the first such number is in {where}" if where else ""),
            hint="look at the learning rate, at what is divided or taken the logarithm of, and at the batch",
        )

    def _first_op(self, stage: int, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> str | None:
        """The first op of a stage whose result is not finite; None if it cannot be run again here."""
        if self.captured.cut is not None:
            return None
        device = next(iter(inputs.values())).device
        module = extract(self.captured, self.stages, stage, str(device))
        given = [inputs[name] if name in inputs else state[name] for name in module.names]
        planned = [node.meta["val"].shape for node in module.module.graph.find_nodes(op="placeholder")]
        if [tensor.shape for tensor in given] != planned:
            return None  # the graph is of micro-batches of another size
        found = _Interpreter(module.module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            found.run(*given)
        if found.first is None:
            return None
        op = self.captured.graph.op[found.first.meta["custom"]["op"]]
        return f"{op.name} of {op.module or self.captured.graph.name}"


class _Interpreter(fx.Interpreter):
    first: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self.first is None and n.op == "call_function" and not all(map(_finite, tensors_of(result))):
            self.first = n
        return result


def _finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor).all())
