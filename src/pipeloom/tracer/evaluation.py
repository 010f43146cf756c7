"""The captured training graph in evaluation mode: no dropout, running statistics, no buffer updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from .joint import StageModule
from .meta import autocast_region
from .tape import compile_graph

_TRAINING_FLAG: Mapping[object, tuple[int, object]] = {
    torch.ops.aten.native_dropout.default: (2, False),
    torch.ops.aten.dropout.default: (2, False),
    torch.ops.aten.feature_dropout.default: (2, False),
    torch.ops.aten.alpha_dropout.default: (2, False),
    torch.ops.aten.rrelu_with_noise_functional.default: (4, False),
    torch.ops.aten._native_batch_norm_legit_functional.default: (5, False),
    torch.ops.aten.native_batch_norm.default: (5, False),
    torch.ops.aten.scaled_dot_product_attention.default: (4, 0.0),
}
"""Call -> position and evaluation-mode value of the argument that differs between the two modes."""

Evaluation = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]


def evaluation_graph(stage: StageModule) -> fx.Graph:
    """A copy of the stage's graph with every training flag off and without buffer updates."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.module.graph, {}))
    for node in graph.nodes:
        if node.target in _TRAINING_FLAG:
            position, value = _TRAINING_FLAG[node.target]
            if len(node.args) > position:
                node.update_arg(position, value)
    output = graph.output_node()
    made = zip(stage.outputs, output.args[0], strict=True)  # type: ignore[arg-type]
    output.args = (tuple(node for name, node in made if not name.startswith("buffer:")),)
    placeholders = graph.find_nodes(op="placeholder")
    graph.eliminate_dead_code()
    assert graph.find_nodes(op="placeholder") == placeholders
    return graph


def compile_evaluation(stage: StageModule, device: str, autocast: torch.dtype | None) -> Evaluation:
    """The function (state, inputs) -> outputs by name."""
    run = compile_graph(evaluation_graph(stage), stage.module)
    names = [name for name in stage.outputs if not name.startswith("buffer:")]

    def evaluate(state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        box = [
            state[name] if kind in ("param", "buffer") else inputs[name]
            for name, kind in zip(stage.names, stage.kinds, strict=True)
        ]
        with torch.no_grad(), autocast_region(device, autocast):
            made = run(box)
        held = {t.untyped_storage()._cdata for t in (*state.values(), *inputs.values())}
        return {
            name: t.clone() if t.untyped_storage()._cdata in held else t
            for name, t in zip(names, made, strict=True)
        }

    return evaluate
