"""The two ways to the same numbers: any stage, and rows of intervals."""

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from layered import layered
from random_ops import cluster_of, op_chain, op_graph, profile_of
from random_stages import random_model

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.graph import Op, OpGraph, Parameter, UpdateBytes, Value
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.ir.stages import cut
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions, Footprint, peak_bytes
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage
from pipeloom.profiler.roofline import roofline


def read_by(name: str, size: int, *sources: str, view: bool = False, grad: bool = False) -> Op:
    out = Value(name=name, shape=(size,), dtype="float32", needs_grad=grad)
    return Op(name=name, target="aten.some.default", inputs=sources, outputs=(out,), view=view)


def of_ops(*ops: Op) -> tuple[OpGraph, Profile]:
    """A graph without parameters, whose ops take a second each."""
    graph = OpGraph(name="hand", inputs=(), ops=ops, parameters=(), buffers=(), loss=ops[-1].name)
    costs = {op.name: OpCost(forward_s=1) for op in ops}
    return graph, Profile(device="cpu", source="hand", graph=graph.fingerprint, batch=(), costs=costs)


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_rows_of_intervals_agree_with_stages(data):
    ops = data.draw(st.integers(1, 9))
    graph = op_graph(data.draw, ops)
    profiles = [profile_of(data.draw, graph) for _ in range(2)]
    stages = data.draw(st.integers(1, ops))
    inner = sorted(data.draw(st.permutations(range(1, ops)))[: stages - 1])
    cuts = [0, *inner, ops]
    options = CostOptions(microbatches=4)
    kinds = [profiles[s % 2] for s in range(stages)]
    cluster = cluster_of([1] * stages, bandwidth=20.0, latency_s=1.0, nodes=2)
    model = CostModel(graph, kinds, cluster, options)
    assigned = [op.name for op in graph.ops if not op.cheap]
    stage_of = {name: sum(c <= p for c in inner) for p, name in enumerate(assigned)}
    stage_graph = cut(graph, stage_of)
    for s in range(stages):
        footprint, seconds = model.row(cuts[s], np.arange(cuts[s] + 1, ops + 1))
        here = cuts[s + 1] - cuts[s] - 1
        expected = model.stage_footprint(stage_graph, s, once=True)
        assert footprint.at(here) == expected
        each, in_flight = model.stage_footprint(stage_graph, s), s + 1
        turn_s = model.turns(footprint, seconds, np.array([s]))[0, here]
        held = model.peaks(footprint, np.array([in_flight]))[0, here]
        stage = estimate_stage(model, stage_graph, s)
        plan = stage.plan(in_flight)
        if each == expected:
            assert turn_s == pytest.approx(stage.turn_s) and held == plan.memory.total
        else:  # several stages read a value, each of which gets a message of its own
            assert each.sent > expected.sent and turn_s <= stage.turn_s * (1 + 1e-9)
            assert held <= plan.memory.total


@pytest.mark.xfail(
    reason="LivenessSweep.bounds leaves out a storage that only a later stage saves, although only a part of "
    "it is sent: no message counts the rest. To mend it changes plans."
)
def test_rough_rows_are_upper_bounds_where_a_part_of_a_saved_storage_is_sent():
    a = read_by("a", 2)
    graph, profile = of_ops(a, read_by("v", 1, "a", view=True), read_by("b", 1, "v"))
    profile = replace(profile, costs={**profile.costs, "b": OpCost(forward_s=1, saves=("v",))})
    model = CostModel(graph, [profile], cluster_of([1]), CostOptions(microbatches=1))
    exact, rough = (model.row(0, np.arange(1, 4), exact=exact)[0] for exact in (True, False))
    assert (rough.forward_transient >= exact.forward_transient).all()


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_rough_rows_are_upper_bounds(data):
    """In the forward only where no view is a part of its storage; see the test above."""
    ops = data.draw(st.integers(1, 9))
    graph = op_graph(data.draw, ops)
    profile = profile_of(data.draw, graph)
    model = CostModel(graph, [profile], cluster_of([1]), CostOptions(microbatches=4))
    whole = all(model.readers.is_whole(value) for value in graph.value.values())
    for start in range(ops):
        ends = np.arange(start + 1, ops + 1)
        exact, rough = (model.row(start, ends, exact=exact)[0] for exact in (True, False))
        assert (rough.backward_transient >= exact.backward_transient).all()
        assert not whole or (rough.forward_transient >= exact.forward_transient).all()


def linear(name: str, source: str, size: int, weight: str) -> Op:
    out = Value(name=name, shape=(size,), dtype="float32", needs_grad=True)
    return Op(name=name, target="aten.linear.default", inputs=(source,), outputs=(out,), params=(weight,))


def two_linears() -> tuple[OpGraph, Profile]:
    """x -> a = linear(x, w) -> v = view(a) -> b = linear(v, w) -> loss; the weight is tied."""
    view = replace(read_by("v", 10, "a", view=True, grad=True), target="aten.reshape.default")
    momentum = UpdateBytes(state=400, step=400)
    graph = OpGraph(
        name="two",
        inputs=(Value(name="x", shape=(10,), dtype="float32"),),
        ops=(linear("a", "x", 10, "w"), view, linear("b", "v", 20, "w")),
        parameters=(Parameter(name="w", shape=(100,), dtype="float32", given_update=momentum),),
        buffers=(),
        loss="b",
    )
    costs = {
        "a": OpCost(forward_s=1, input_grad_s=0, weight_grad_s=2, saves=("x",)),
        "v": OpCost(forward_s=0),
        "b": OpCost(forward_s=3, input_grad_s=3, weight_grad_s=3, saves=("a",), extra_saved_bytes=8),
    }
    return graph, Profile(device="cpu", source="hand", graph=graph.fingerprint, batch=(), costs=costs)


APART, TOGETHER = {"a": 0, "v": 0, "b": 1}, {"a": 0, "v": 0, "b": 0}


def model_of(graph: OpGraph, profile: Profile, stages: int = 1, **options) -> CostModel:
    options = CostOptions(**{"microbatches": 2 * stages} | options)
    return CostModel(graph, [profile] * stages, cluster_of([1] * stages), options)


def whole(graph: OpGraph, profile: Profile, **costs: OpCost) -> Footprint:
    """Of all ops as one stage, some of which cost something else."""
    made = replace(profile, costs=profile.costs | costs)
    return model_of(graph, made).stage_footprint(cut(graph, TOGETHER), 0)


def test_memory_by_kind_of_a_hand_made_cut():
    graph, profile = two_linears()
    model, stages = model_of(graph, profile, 2), cut(graph, APART)
    first, second = estimate_stage(model, stages, 0).plan(2), estimate_stage(model, stages, 1).plan(1)
    assert (first.memory.parameters, first.memory.gradients, first.memory.optimizer) == (400, 400, 400)
    assert second.memory.parameters == 400  # a tied parameter has a replica in each stage that reads it
    assert (first.memory.residuals, first.memory.buffers) == (0, 4 * 40)  # it saves x, which is the batch
    assert second.memory.residuals == 8  # v, whose storage is a's, stays in its receive buffer
    # At the backward: buffers of gradients, one in use and two ahead; a v is still on its way.
    assert first.memory.boundary == 3 * 40 + 40
    # Buffers of v, one in use and two ahead; a gradient is made, and another one is on its way.
    assert second.memory.boundary == 3 * 40 + 2 * 40
    assert estimate_stage(model, stages, 1).plan(2).memory.boundary == 4 * 40 + 2 * 40  # one more is kept
    at_once = model_of(graph, profile, 2, sends_in_flight=0)
    assert estimate_stage(at_once, stages, 1).plan(1).memory.boundary == 3 * 40 + 40
    # Around b only the new gradient of w: that of v is a message. Around a also its own, made by the view.
    assert (first.memory.transient, second.memory.transient) == (40 + 400, 400)
    assert (first.forward_s, first.input_grad_s, first.weight_grad_s) == (1, 0, 2)


def test_a_received_value_that_is_not_saved_frees_its_buffer_after_the_forward():
    graph, profile = two_linears()
    profile = replace(profile, costs={**profile.costs, "b": OpCost(forward_s=1)})
    model = model_of(graph, profile, 2, microbatches=9, sends_in_flight=0)
    assert estimate_stage(model, cut(graph, APART), 1).plan(3).memory.boundary == 2 * 40 + 40


def untied(graph: OpGraph) -> OpGraph:
    """The same with a weight of its own for b."""
    own = (*graph.parameters, Parameter(name="u", shape=(100,), dtype="float32"))
    return replace(graph, ops=(*graph.ops[:2], linear("b", "v", 20, "u")), parameters=own)


def test_what_is_freed_along_the_way():
    tied, profile = two_linears()
    graph = untied(tied)
    found = whole(graph, profile)
    # The forward ends with b (80) besides. Worst is b's backward: gradients of v and u, with all residuals.
    assert (found.residuals, found.forward_transient, found.backward_transient) == (40 + 8, 80, 40 + 400)
    heavy = replace(profile.costs["a"], grad_transient_bytes=1000)
    # Now it is a's: only its own gradients (a is saved by b, gone by then) and the scratch.
    found = whole(graph, profile, a=heavy)
    assert (found.forward_transient, found.backward_transient) == (80, 40 + 400 + 1000 - 48)
    # A gradient that a view passes on is no new tensor.
    passed = OpCost(forward_s=0, passes=("a",))
    assert whole(graph, profile, a=heavy, v=passed).backward_transient == 40 + 400 + 1000 - 48
    assert whole(graph, profile, v=passed).backward_transient == 40 + 400


def test_a_tied_parameter_and_a_value_saved_twice_count_once_and_gradients_are_added_in_the_first_backward():
    found = whole(*two_linears())
    assert (found.parameters, found.residuals, found.received, found.sent) == (400, 40 + 8, 0, 0)
    # Both gradients of w, one of which becomes the sum, and that of a's output; the residuals are gone.
    assert found.backward_transient == 2 * 400 + 40 - 48


def test_a_value_read_twice_gets_its_gradient_added_up():
    reads = {"a": "", "b": "a", "c": "a", "d": "bc"}
    graph, profile = of_ops(*(read_by(name, 10, *sources, grad=True) for name, sources in reads.items()))

    def transient(*passing: tuple[str, str]) -> float:
        own = {name: replace(profile.costs[name], passes=(*source,)) for name, source in passing}
        made = replace(profile, costs=profile.costs | own)
        model = CostModel(graph, [made], cluster_of([1]), CostOptions(microbatches=1))
        return model.stage_footprint(cut(graph, dict.fromkeys("abcd", 0)), 0).backward_transient

    assert transient() == 3 * 40  # in b's backward: its own gradient, a's from c, and a's from b, added to it
    assert transient(("d", "bc")) == 2 * 40  # b's own is the loss's
    assert transient(("b", "a"), ("d", "bc")) == 40  # a's from b is the loss's too: added to a's from c
    assert transient(("b", "a"), ("c", "a")) == 2 * 40  # a's two are b's and c's
    assert transient(("b", "a"), ("c", "a"), ("d", "bc")) == 40  # the sum alone


def test_the_optimizer_needs_scratch_for_its_step():
    graph, profile = two_linears()
    small = replace(graph, ops=tuple(replace(op, params=()) for op in graph.ops))
    model = model_of(small, replace(profile, costs={name: OpCost(forward_s=1) for name in "avb"}))
    assert estimate_stage(model, cut(small, TOGETHER), 0).plan(1).memory.transient == 400


def test_transfers_are_hidden_behind_compute():
    graph, profile = two_linears()
    cluster = cluster_of([1, 1], bandwidth=1.0)  # 40 bytes take 40 s
    model = CostModel(graph, [profile] * 2, cluster, CostOptions(microbatches=4))
    assert [estimate_stage(model, cut(graph, APART), s).turn_s for s in (0, 1)] == [3, 40]


def test_a_part_of_a_storage_is_sent_as_a_copy():
    """Its storage is there until the copies are made; what fills a storage is sent as it is."""
    graph, profile = two_linears()
    halves = tuple(Value(name=f"part{i}", shape=(5,), dtype="float32", needs_grad=True) for i in (0, 1))
    split = Op(name="v", target="aten.split.Tensor", inputs=("a",), outputs=halves, view=True)
    joined = replace(linear("b", "part0", 20, "w"), inputs=("part0", "part1"))
    graph = replace(graph, ops=(graph.ops[0], split, joined))
    model = model_of(graph, replace(profile, graph=graph.fingerprint), 2)
    parts, all_of_it = (model.stage_footprint(cut(graph, {"a": 0, "v": v, "b": 1}), 0) for v in (0, 1))
    assert (parts.sent, parts.whole, parts.forward_transient) == (40, 0, 40)
    assert (all_of_it.sent, all_of_it.whole, all_of_it.forward_transient) == (40, 40, 0)
    row, _ = model.row(0, np.array([1, 2]))
    assert row.whole.tolist() == [40, 0] and row.forward_transient.tolist() == [0, 40]


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), end=st.integers(1, 15))
def test_without_a_gradient_to_return_all_of_a_backward_is_its_w(seed: int, end: int) -> None:
    """One walk is for both: in a stage that receives nothing I only lets go of what no gradient needs."""
    model = random_model(seed, 16)
    sweep = model.tables.sweep
    residuals, _, backward = sweep.of_stage(range(end))
    carried, input_grad, weight_grad = model.split_backward(range(end))
    peak, gives = max(residuals + input_grad, carried + weight_grad), sweep.tensors.backward.gives
    assert peak == backward if np.diff(gives.first[: end + 1]).all() else peak <= backward


# Plans that offload were accepted whose stages hold most in the middle of the forwards.


PARTS = "parameters buffers residuals received received_grads sent sent_grads forward_transient offloaded"
SIZES = st.fixed_dictionaries({name: st.integers(0, 1000).map(float) for name in PARTS.split()})
NOTHING = dict.fromkeys((f.name for f in fields(Footprint)), 0.0)
MICROBATCHES = 8


def forwards(one: Footprint[float], options: CostOptions, in_flight: int) -> Iterator[float]:
    """Bytes of each forward that stands in front of the first backward, counted message by message."""
    ahead, at_once = options.receive_ahead, options.offloaded_at_once
    for begun in range(1, in_flight + 1):
        kept = begun * one.residuals + min(begun, at_once) * one.offloaded
        buffers = (begun if one.saved_inputs else 1) + min(begun + ahead, MICROBATCHES) - begun
        messages = buffers * one.received + min(ahead, MICROBATCHES) * one.sent_grads
        leaving = one.sent + max(one.sent, one.received_grads)
        yield one.parameters + one.buffers + kept + messages + leaving + one.forward_transient


COUNTS = st.integers(0, 1), st.integers(1, MICROBATCHES), st.integers(2, 4), st.integers(1, 3)


@given(SIZES, *COUNTS)
def test_no_forward_of_a_stage_holds_more_than_is_predicted(sizes, saved_inputs, in_flight, at_once, ahead):
    options = CostOptions(microbatches=MICROBATCHES, receive_ahead=ahead, offloaded_at_once=at_once)
    footprint = Footprint(**NOTHING | sizes | {"saved_inputs": float(saved_inputs)})
    assert max(forwards(footprint, options, in_flight)) <= peak_bytes(footprint, options, in_flight)


@pytest.mark.parametrize("length", [5, 37, 100])
def test_equal_stretches_weigh_the_same_and_there_are_few(length: int) -> None:
    graph, cluster = layered(24), find_cluster("2 x a100-40")
    model = CostModel(graph, [roofline(graph, cluster.devices[0])] * 2, cluster, CostOptions(microbatches=4))
    starts: dict[object, list[int]] = {}
    for start in range(len(model) - length):
        starts.setdefault(model.tables.equal.key(start, start + length), []).append(start)
    assert len(starts) <= len(model) / 4, "a layer has 12 ops, and is there 24 times"
    for group in starts.values():
        rows = [model.row(start, np.array([start + length])) for start in group[:: max(1, len(group) // 3)]]
        assert len({row.at(0) for row, _ in rows}) == 1
        assert [seconds[0, 0] for _, seconds in rows] == pytest.approx([rows[0][1][0, 0]] * len(rows))


def test_stretches_of_other_seconds_are_not_equal() -> None:
    """Tanh and softmax of the same sizes: a stretch of one was taken for one of the other."""
    graph, profile = op_chain([1.0] * 80 + [2.0] * 80)
    cluster = find_cluster("2 x a100-40")
    model = CostModel(graph, [profile] * 2, cluster, CostOptions(microbatches=4))
    assert [model.interval(start, start + 30)[1] for start in (10, 20, 100)] == [[30.0], [30.0], [60.0]]
    one, other = (model.tables.equal.key(start, start + 30) for start in (10, 20))
    assert one == other
