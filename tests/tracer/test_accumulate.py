"""Sums of gradients that are made in place, and products that are added as they are made: which are, and that
no number changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeloom.runtime.weights import Gradients
from pipeloom.tracer.stage.accumulate import add_gradient, add_in_place, add_product, add_products
from pipeloom.tracer.stage.compile_graph import compile_graph, predict_memory, run_measured

aten = torch.ops.aten
SHAPE = (8, 16)
BYTES = 4 * 8 * 16


def graph_of(write: Callable[[fx.Graph, fx.Node, fx.Node], object]) -> fx.Graph:
    """The graph of a function of two tensors, with fake results, its sums made in place where they can be."""
    graph = fx.Graph()
    inputs = graph.placeholder("a"), graph.placeholder("b")
    graph.output(write(graph, *inputs))
    with FakeTensorMode():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = torch.empty(SHAPE)
            elif node.op == "call_function":
                node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
    add_in_place(graph, [n for n in graph.nodes if n.target is aten.add.Tensor])
    return graph


def targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def run(graph: fx.Graph) -> tuple[Tensor, ...]:
    """Run it in three ways that must agree, inputs untouched; returns the results."""
    torch.manual_seed(0)
    inputs = [torch.randn(SHAPE), torch.randn(SHAPE)]
    before = [t.clone() for t in inputs]
    results = compile_graph(graph, None)([*inputs])
    again, measured = run_measured(graph, None, [*inputs], {})
    assert all(map(torch.equal, results, again))
    assert all(map(torch.equal, inputs, before))
    assert measured == predict_memory(graph, {})
    return results


def test_the_first_addend_holds_the_sum_if_nothing_reads_it_afterwards() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        made = g.call_function(aten.mul.Tensor, (a, b))
        return (g.call_function(aten.add.Tensor, (made, a)),)

    graph = graph_of(write)
    assert targets(graph) == [aten.mul.Tensor, aten.add_.Tensor]
    a, b = torch.manual_seed(0) and (torch.randn(SHAPE), torch.randn(SHAPE))
    assert torch.equal(run(graph)[0], a * b + a)
    assert predict_memory(graph, {}).peak_bytes == BYTES


def test_the_second_addend_holds_it_if_the_first_is_an_input() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        made = g.call_function(aten.mul.Tensor, (a, b))
        return (g.call_function(aten.add.Tensor, (a, made)),)

    graph = graph_of(write)
    assert targets(graph) == [aten.mul.Tensor, aten.add_.Tensor]
    run(graph)


def test_what_is_read_again_is_left_alone_also_through_a_view() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        made = g.call_function(aten.mul.Tensor, (a, b))
        view = g.call_function(aten.view.default, (made, [16, 8]))
        total = g.call_function(aten.add.Tensor, (made, a))
        return total, g.call_function(aten.neg.default, (view,))

    graph = graph_of(write)
    assert aten.add_.Tensor not in targets(graph)
    run(graph)


def test_what_is_handed_out_is_left_alone() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        made = g.call_function(aten.mul.Tensor, (a, b))
        return made, g.call_function(aten.add.Tensor, (made, a))

    assert aten.add_.Tensor not in targets(graph_of(write))


def test_a_part_of_a_tensor_does_not_hold_the_sum_as_all_of_it_would_stay() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        wide = g.call_function(aten.cat.default, ([a, b],))
        part = g.call_function(aten.slice.Tensor, (wide, 0, 0, SHAPE[0]))
        return (g.call_function(aten.add.Tensor, (part, a)),)

    assert aten.add_.Tensor not in targets(graph_of(write))


def test_a_tensor_is_not_added_to_itself_through_a_view() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        made = g.call_function(aten.mul.Tensor, (a, b))
        flat = g.call_function(aten.view.default, (made, [128]))
        back = g.call_function(aten.view.default, (flat, list(SHAPE)))
        return (g.call_function(aten.add.Tensor, (made, back)),)

    assert aten.add_.Tensor not in targets(graph_of(write))


def test_a_sum_of_another_type_or_shape_is_new() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        row = g.call_function(aten.sum.dim_IntList, (a, [0]))
        return (g.call_function(aten.add.Tensor, (row, b)),)

    assert aten.add_.Tensor not in targets(graph_of(write))


def test_a_chain_of_sums_lies_in_one_tensor_and_views_of_it_follow() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        total = g.call_function(aten.mul.Tensor, (a, b))
        for _ in range(3):
            total = g.call_function(aten.add.Tensor, (total, g.call_function(aten.neg.default, (a,))))
        view = g.call_function(aten.view.default, (total, [16, 8]))
        return (g.call_function(aten.mul.Tensor, (view, view)),)

    graph = graph_of(write)
    assert targets(graph).count(aten.add_.Tensor) == 3
    run(graph)
    assert predict_memory(graph, {}).peak_bytes == 2 * BYTES


def test_a_sum_whose_parts_are_read_later_keeps_its_own_memory_while_they_do() -> None:
    def write(g: fx.Graph, a: fx.Node, b: fx.Node) -> object:
        made = g.call_function(aten.mul.Tensor, (a, b))
        first = g.call_function(aten.add.Tensor, (made, a))  # in place
        second = g.call_function(aten.add.Tensor, (first, b))  # not: `first` is read again
        return second, g.call_function(aten.neg.default, (first,))

    graph = graph_of(write)
    assert targets(graph)[1:3] == [aten.add_.Tensor, aten.add.Tensor]
    run(graph)


def calls_of(write: Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], object]) -> list[object]:
    """The calls of a graph that adds a product to the gradient of "w"; two runs of it add it twice."""
    graph = fx.Graph()
    sink, left, right = (graph.placeholder(name) for name in ("sink", "left", "right"))
    graph.output((write(graph, sink, left, right),))
    add_products(graph)
    torch.manual_seed(0)
    left_value, right_value = torch.randn(4, 8), torch.randn(8, 3)
    gradients = Gradients({"w": nn.Parameter(torch.randn(4, 3))})
    for _ in range(2):
        compile_graph(graph, None)([gradients, left_value, right_value])
    torch.testing.assert_close(gradients.total("w"), 2 * left_value @ right_value)
    return targets(graph)


def test_a_product_that_is_only_a_gradient_is_added_as_it_is_made() -> None:
    def write(g: fx.Graph, sink: fx.Node, left: fx.Node, right: fx.Node) -> object:
        made = g.call_function(aten.mm.default, (left, right))
        return g.call_function(add_gradient, (sink, "w", made))

    assert calls_of(write) == [add_product]


def test_a_product_that_is_read_otherwise_too_is_made() -> None:
    def write(g: fx.Graph, sink: fx.Node, left: fx.Node, right: fx.Node) -> object:
        made = g.call_function(aten.mm.default, (left, right))
        g.call_function(add_gradient, (sink, "w", made))
        return made

    assert calls_of(write) == [aten.mm.default, add_gradient]


def test_the_first_product_of_a_step_overwrites_what_the_last_step_left() -> None:
    gradients = Gradients({"w": nn.Parameter(torch.zeros(4, 3))})
    left, right = torch.randn(4, 8), torch.randn(8, 3)
    for _ in range(2):
        gradients.clear()
        gradients.add_product("w", left, right)
        assert torch.equal(gradients.total("w"), left @ right)
