"""Which function runs an op of a stage: torch's own, which is faster, where it does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeloom.tracer.stage.compiled import compile_graph

aten = torch.ops.aten
CALLS: dict[str, tuple[Any, tuple[Any, ...], Callable[..., Any] | None]] = {
    "a function": (aten.addmm.default, ("x", "x", "x"), torch.addmm),
    "of torch.nn": (aten.gelu.default, ("x",), torch._C._nn.gelu),
    "a method": (aten.mul_.Tensor, ("x", "x"), torch.Tensor.mul_),
    "one that is made of others": (aten.reshape.default, ("x", [2, 8]), torch.reshape),
    "a number as a tensor": (aten.mul.Tensor, ("x", 2.0), torch.mul),
    "torch chooses another overload": (aten.mul.Scalar, ("x", 2.0), None),
    "torch takes other arguments": (aten.std.correction, ("x", [0]), None),
    "torch has none": (aten.embedding_dense_backward.default, ("x", "i", 3, -1, False), None),
    "no tensor": (aten.full.default, ([2], 1.0), None),
}


@pytest.mark.parametrize("name", CALLS)
def test_torchs_own_function_runs_where_it_does_the_same(name: str) -> None:
    target, args, expected = CALLS[name]
    tensors = {"x": torch.randn(4, 4), "i": torch.arange(4)}
    graph = fx.Graph()
    with FakeTensorMode() as fake:
        placeholders = {name: graph.placeholder(name) for name in tensors}
        for name, node in placeholders.items():
            node.meta["val"] = fake.from_tensor(tensors[name])
        node = graph.call_function(
            target, tuple(placeholders.get(a, a) if isinstance(a, str) else a for a in args)
        )
        node.meta["val"] = target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
    graph.output((node,))
    run = compile_graph(graph, None)
    called = [v for k, v in run.__globals__.items() if k.startswith("c") and callable(v)]
    assert called == [target._op if expected is None else expected]
    given = [tensors[a].clone() if isinstance(a, str) else a for a in args]
    assert torch.equal(run([t.clone() for t in tensors.values()])[0], target(*given))
