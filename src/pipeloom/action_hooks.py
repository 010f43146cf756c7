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
        origin = self.stages.origin(stage)
        where = None if inputs is None else self._first(bad[0], origin, state, inputs)
        if where is None:
            read = {n: state[n] for n in self.stages.params[origin]} | dict(inputs or {})
            where = next((name for name, tensor in read.items() if not _finite(tensor)), None)
        raise NumbersError(
            f"{bad[0]} is not finite after {text} on stage {stage}"
            + (f"; the first such number is in {where}" if where else ""),
            hint="look at the learning rate, at what is divided or taken the logarithm of, and at the batch",
        )

    def _first(
        self, bad: str, stage: int, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> str | None:
        """Where what is not finite in a result of a stage comes from: the first op whose such numbers led
        there, or what the stage reads; None if it cannot be run again here. Others may be meant, as the -inf
        of a mask, of which a softmax makes zeros."""
        if self.captured.cut is not None:
            return None
        device = next((tensor.device for tensor in (*inputs.values(), *state.values())), torch.device("cpu"))
        module = extract(self.captured, self.stages, stage, str(device))
        given = [inputs[name] if name in inputs else state[name] for name in module.names]
        planned = [node.meta["val"].shape for node in module.module.graph.find_nodes(op="placeholder")]
        if [tensor.shape for tensor in given] != planned:
            return None  # the graph is of micro-batches of another size
        found = _Interpreter(module.module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            found.run(*given)
        nodes = module.module.graph.nodes
        results: Any = module.module.graph.output_node().args[0]
        led = {node for name, node in zip(module.outputs, results, strict=True) if name == bad} & found.odd
        for node in reversed(nodes):
            if node in led:
                led.update(found.odd.intersection(node.all_input_nodes))
        first = next((node for node in nodes if node in led), None)
        if first is None:
            return None
        if first.op == "placeholder":
            return module.names[[n for n in nodes if n.op == "placeholder"].index(first)]
        op = self.captured.graph.op[first.meta["custom"]["op"]]
        return f"{op.name} of {op.module or self.captured.graph.name}"


class _Interpreter(fx.Interpreter):
    """odd: nodes of which some numbers are not finite."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.odd: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if not all(map(_finite, tensors_of(result))):
            self.odd.add(n)
        return result


def _finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor).all())
