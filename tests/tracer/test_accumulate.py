"""Sums of gradients that are made in place, and products that are added as they are made: which are, and that
no number changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeloom.runtime.weights import Gradients
from pipeloom.tracer.stage.compiled import LEFT_IN_THEIR_INPUTS_SIZE, compile_graph, peak_bytes
from pipeloom.tracer.stage.split import add_gradient, add_in_place, add_product, add_products
from pipeloom.tracer.tensors import LiveBytes, storage_bytes

aten = torch.ops.aten
SHAPE = (8, 16)
BYTES = 4 * 8 * 16


def graph_of(write: Callable[..., object]) -> fx.Graph:
    """The graph of a function of ops and two tensors, its sums made in place where they can be."""
    graph = fx.Graph()
    inputs = graph.placeholder("a"), graph.placeholder("b")
    made = write(lambda target, *args: graph.call_function(target, args), *inputs)
    graph.output(made if isinstance(made, tuple) else (made,))
    with FakeTensorMode():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = torch.empty(SHAPE)
            elif node.op == "call_function":
                node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
    add_in_place(graph, [n for n in graph.nodes if n.target is ADD])
    return graph


def targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def assert_equal_every_way(graph: fx.Graph, write: Callable[..., object]) -> None:
    """Run it compiled and eagerly: equal results, inputs untouched, memory as predicted."""
    torch.manual_seed(0)
    inputs = [torch.randn(SHAPE), torch.randn(SHAPE)]
    before = [t.clone() for t in inputs]
    made = write(lambda target, *args: target(*args), *before)
    expected = made if isinstance(made, tuple) else (made,)
    run, _ = compile_graph(graph, None)
    with LiveBytes() as live:
        results = run([*inputs])
    assert all(map(torch.equal, results, expected))
    assert all(map(torch.equal, inputs, before))
    assert live.peak_bytes == peak_bytes(graph, {})
    assert storage_bytes(results) == storage_bytes(node.meta["val"] for node in graph.output_node().args[0])


ADD, IN_PLACE, MUL, NEG, VIEW = (
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.mul.Tensor,
    aten.neg.default,
    aten.view.default,
)


def chain_of_sums(do, a, b):
    """A view of what lies in one tensor follows."""
    total = do(MUL, a, b)
    for _ in range(3):
        total = do(ADD, total, do(NEG, a))
    view = do(VIEW, total, [16, 8])
    return do(MUL, view, view)


def read_again_through_a_view(do, a, b):
    made = do(MUL, a, b)
    view = do(VIEW, made, [16, 8])
    return do(ADD, made, a), do(NEG, view)


def handed_out(do, a, b):
    made = do(MUL, a, b)
    return made, do(ADD, made, a)


def added_to_itself_through_a_view(do, a, b):
    made = do(MUL, a, b)
    return do(ADD, made, do(VIEW, do(VIEW, made, [128]), list(SHAPE)))


def read_later(do, a, b):
    """The first sum can be in place, but is read again after the second."""
    first = do(ADD, do(MUL, a, b), a)
    return do(ADD, first, b), do(NEG, first)


@pytest.mark.parametrize(
    ("write", "sums", "peak"),
    [
        (lambda do, a, b: do(ADD, do(MUL, a, b), a), [IN_PLACE], 1),
        (lambda do, a, b: do(ADD, a, do(MUL, a, b)), [IN_PLACE], 1),  # the first one is an input
        (chain_of_sums, [IN_PLACE] * 3, 2),
        (read_again_through_a_view, [ADD], None),
        (handed_out, [ADD], None),
        # Of a part all of the tensor would stay.
        (
            lambda do, a, b: do(ADD, do(aten.slice.Tensor, do(aten.cat.default, [a, b]), 0, 0, 8), a),
            [ADD],
            None,
        ),
        (added_to_itself_through_a_view, [ADD], None),
        (lambda do, a, b: do(ADD, do(aten.sum.dim_IntList, a, [0]), b), [ADD], None),  # another shape
        (read_later, [IN_PLACE, ADD], None),
    ],
)
def test_sums_are_made_in_place_where_nothing_reads_the_addend(
    write: Callable[..., object], sums: list[object], peak: int | None
) -> None:
    """peak: in tensors."""
    graph = graph_of(write)
    assert [target for target in targets(graph) if target in (ADD, IN_PLACE)] == sums
    assert_equal_every_way(graph, write)
    assert peak is None or peak_bytes(graph, {}) == peak * BYTES


@pytest.mark.parametrize("read_otherwise", [False, True])
def test_a_product_that_is_only_a_gradient_is_added_as_it_is_made(read_otherwise: bool) -> None:
    """Two runs of it add it twice."""
    graph = fx.Graph()
    sink, left, right = (graph.placeholder(name) for name in ("sink", "left", "right"))
    made = graph.call_function(aten.mm.default, (left, right))
    added = graph.call_function(add_gradient, (sink, "w", made))
    graph.output((made if read_otherwise else added,))
    add_products(graph)
    assert targets(graph) == ([aten.mm.default, add_gradient] if read_otherwise else [add_product])
    torch.manual_seed(0)
    factors = torch.randn(4, 8), torch.randn(8, 3)
    gradients = Gradients({"w": nn.Parameter(torch.randn(4, 3))})
    for _ in range(2):
        compile_graph(graph, None)[0]([gradients, *factors])
    torch.testing.assert_close(gradients.total("w"), 2 * factors[0] @ factors[1])


def test_the_first_product_of_a_step_overwrites_what_the_last_step_left() -> None:
    gradients = Gradients({"w": nn.Parameter(torch.zeros(4, 3))})
    left, right = torch.randn(4, 8), torch.randn(8, 3)
    for _ in range(2):
        gradients.clear()
        gradients.add_product("w", left, right)
        assert torch.equal(gradients.total("w"), left @ right)


# Which function runs an op of a stage.


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
    run, _ = compile_graph(graph, None)
    called = [v for k, v in run.__globals__.items() if k.startswith("c") and callable(v)]
    assert called == [target._op if expected is None else expected]
    given = [tensors[a].clone() if isinstance(a, str) else a for a in args]
    assert torch.equal(run([t.clone() for t in tensors.values()])[0], target(*given))


@pytest.mark.parametrize("op", sorted(LEFT_IN_THEIR_INPUTS_SIZE, key=str), ids=str)
def test_the_memory_that_losses_leave_their_number_in(op: Callable[..., torch.Tensor]) -> None:
    def write(do, a, b):
        made = do(aten.sigmoid.default, a)
        if op is aten.col2im.default:
            return do(op, made, [SHAPE[1] + 1, 1], [2, 1], [1, 1], [0, 0], [1, 1])
        return do(op, made, do(aten.sigmoid.default, b))

    assert_equal_every_way(graph_of(write), write)
