"""make_plan from graph to plan file, and what it refuses."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pipeloom.ir import json_codec
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.ir.graph import Op, OpGraph, Parameter, Value
from pipeloom.ir.plan import Plan, StagePlan, load_plan
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.ir.units import parse_bytes
from pipeloom.planner import infeasible, make_plan, plan_table, request

SIZE = 1000  # numbers per value and per weight: 4000 bytes


def layers(count: int, *, tied: bool = False) -> tuple[OpGraph, Profile]:
    """x -> linear -> linear ...; each 1 s forward, 2 s backward; with `tied` the last reuses w0."""
    ops, costs, source = [], {}, "x"
    for k in range(count):
        out = Value(name=f"v{k}", shape=(2, SIZE // 2), dtype="float32", needs_grad=True)
        weight = "w0" if tied and k == count - 1 else f"w{k}"
        reads = {"inputs": (source,), "params": (weight,)}
        ops.append(Op(name=f"op{k}", target="aten.linear.default", outputs=(out,), **reads))
        costs[f"op{k}"] = OpCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, saves=(source,))
        source = out.name
    names = sorted({name for op in ops for name in op.params})
    graph = OpGraph(
        name="layers",
        inputs=(Value(name="x", shape=(2, SIZE // 2), dtype="float32"),),
        ops=tuple(ops),
        parameters=tuple(Parameter(name=n, shape=(SIZE,), dtype="float32") for n in names),
        buffers=(),
        loss=source,
    )
    batch = ("x[2,500]float32",)
    return graph, Profile(device="d", source="hand", graph=graph.fingerprint, batch=batch, costs=costs)


def cluster_of(count: int, memory: str | int = "1GiB", name: str = "d") -> Cluster:
    device = Device(name=name, memory_bytes=parse_bytes(memory))
    return Cluster(devices=(device,) * count, within_node=Link(bandwidth_bytes_per_s=1e9))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_cuts_schedules_and_predicts(schedule, split, tied, tmp_path):
    graph, profile = layers(8, tied=tied)
    options = request.PlanOptions(split_backward=split)
    plan = make_plan.make_plan(
        graph, profile, cluster_of(2), ranks=2, schedule=schedule, microbatches=4, options=options
    )
    assert [len(stage.ops) for stage in plan.stages] == [4, 4]
    # M + S - 1 turns of 12 s; with the split, the first stage's last backward starts 4 s earlier, after I.
    assert plan.predicted_step_s == pytest.approx((4 + 2 - 1) * 12 - 4 * split, rel=1e-4)
    assert plan.microbatch_size == 2 and plan.batch == profile.batch
    assert plan.stage_graph(graph).tied == ({"w0": (0, 1)} if tied else {})
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_gpipe_holds_more_than_1f1b():
    graph, profile = layers(8)
    held = {
        name: make_plan.make_plan(graph, profile, cluster_of(2), ranks=2, schedule=name, microbatches=6)
        .stages[0]
        .memory.residuals
        for name in ("gpipe", "1f1b")
    }
    assert held == {"gpipe": 6 * 3 * 4000, "1f1b": 2 * 3 * 4000}  # of four inputs one is the batch


def test_explain_has_one_row_per_stage():
    graph, profile = layers(5)
    plan = make_plan.make_plan(graph, profile, cluster_of(2), ranks=2, schedule="1f1b", microbatches=2)
    first, second = plan_table.plan_rows(plan)
    assert (first.rank, first.first_op, second.last_op) == (0, "op0", "op4")
    assert first.peak_bytes == plan.stages[0].memory.total
    assert first.filled == plan.peaks[0] / 2**30


def test_more_stages_than_ops():
    graph, profile = layers(3)
    with pytest.raises(PlanError, match="4 stages for 3 ops"):
        make_plan.make_plan(graph, profile, cluster_of(4), ranks=4, schedule="1f1b", microbatches=2)


def test_more_stages_than_devices():
    graph, profile = layers(3)
    with pytest.raises(PlanError, match="3 stages for 2 devices"):
        make_plan.make_plan(graph, profile, cluster_of(2), ranks=3, schedule="1f1b", microbatches=2)


def test_a_profile_of_another_model():
    graph, _ = layers(3)
    _, other = layers(4)
    with pytest.raises(PlanError, match="profile was made for model"):
        make_plan.make_plan(graph, other, cluster_of(2), ranks=2, schedule="1f1b", microbatches=2)


def test_an_unknown_planner():
    graph, profile = layers(3)
    with pytest.raises(PlanError, match="did you mean exact"):
        make_plan.make_plan(
            graph, profile, cluster_of(2), ranks=2, schedule="1f1b", microbatches=2, planner="exakt"
        )


def test_profiles_by_device_name():
    graph, profile = layers(9)
    twice = OpCost(forward_s=2.0, input_grad_s=2.0, weight_grad_s=2.0)
    slow = replace(profile, device="slow", costs=dict.fromkeys(profile.costs, twice))
    devices = (*cluster_of(1).devices, *cluster_of(1, name="slow").devices)
    cluster = replace(cluster_of(1), devices=devices)
    plan = make_plan.make_plan(
        graph, {"d": profile, "slow": slow}, cluster, ranks=2, schedule="1f1b", microbatches=2
    )
    assert [len(stage.ops) for stage in plan.stages] == [6, 3]
    with pytest.raises(PlanError, match="no profile for device slow"):
        make_plan.make_plan(graph, {"d": profile}, cluster, ranks=2, schedule="1f1b", microbatches=2)


def test_infeasible_names_stage_need_cap_and_what_would_do():
    graph, profile = layers(8)
    arguments = {"ranks": 2, "schedule": "1f1b", "microbatches": 4}
    with pytest.raises(InfeasibleError) as caught:
        make_plan.make_plan(graph, profile, cluster_of(2, "100kB"), **arguments)
    text = str(caught.value)
    assert "no cut of 8 ops into 2 stages fits" in text
    assert "its device's cap is 97.7 KiB" in text
    # The cap is right to the byte: it does, one byte less does not.
    smallest = smallest_cap(graph, profile)
    assert isinstance(caught.value, infeasible.NoCutFits) and caught.value.stages == 4
    assert caught.value.share == pytest.approx(smallest / 100_000)
    assert make_plan.make_plan(graph, profile, cluster_of(2, smallest), **arguments)
    with pytest.raises(InfeasibleError):
        make_plan.make_plan(graph, profile, cluster_of(2, smallest - 1), **arguments)
    with pytest.raises(InfeasibleError):
        make_plan.make_plan(graph, profile, cluster_of(3, "100kB"), **(arguments | {"ranks": 3}))
    assert make_plan.make_plan(graph, profile, cluster_of(4, "100kB"), **(arguments | {"ranks": 4}))


def smallest_cap(graph: OpGraph, profile: Profile) -> int:
    """By trying every cut in two with no cap."""
    from pipeloom.planner.infeasible import stage_needs
    from pipeloom.planner.search.cut_search import Search
    from pipeloom.planner.stage_cost.model import CostModel
    from pipeloom.planner.stage_cost.peak_memory import CostOptions

    model = CostModel(graph, [profile] * 2, cluster_of(2), CostOptions(microbatches=4))
    search = Search(model=model, caps=(1, 1), in_flight=(2, 1))
    return min(max(stage_needs(search, (0, cut, len(model)))) for cut in range(1, len(model)))


def test_equal_ignores_memory_and_is_refused_if_it_does_not_fit():
    graph, profile = layers(8)
    arguments = {"ranks": 2, "schedule": "1f1b", "microbatches": 4}
    smallest = smallest_cap(graph, profile)
    plan = make_plan.make_plan(graph, profile, cluster_of(2), planner="equal", **arguments)
    assert plan.planner == "equal" and [len(s.ops) for s in plan.stages] == [4, 4]
    with pytest.raises(InfeasibleError, match="planner equal gives stage 0 "):
        make_plan.make_plan(graph, profile, cluster_of(2, smallest - 1), planner="equal", **arguments)


def test_equal_leaves_no_stage_empty():
    graph, profile = layers(4)
    heavy = replace(profile, costs={**profile.costs, "op0": replace(profile.costs["op0"], forward_s=100.0)})
    plan = make_plan.make_plan(
        graph, heavy, cluster_of(4), ranks=4, schedule="1f1b", microbatches=2, planner="equal"
    )
    assert [stage.ops for stage in plan.stages] == [("op0",), ("op1",), ("op2",), ("op3",)]


def test_explain_is_plain_data():
    graph, profile = layers(4)
    plan = make_plan.make_plan(graph, profile, cluster_of(2), ranks=2, schedule="gpipe", microbatches=2)
    rows = plan_table.plan_rows(plan)
    assert json_codec.to_json(rows)
    assert all(a.last_op < b.first_op for a, b in pairwise(rows))


def test_rows_say_which_stages_a_stage_reads_and_how_deep_it_is():
    """Two towers of two stages and a join; the ops of a stage are one op."""
    edges = {0: (), 1: ("v0",), 2: (), 3: ("v2",), 4: ("v1", "v3")}
    ops = tuple(
        Op(
            name=f"op{s}",
            target="x",
            inputs=reads,
            outputs=(Value(name=f"v{s}", shape=(4,), dtype="float32", needs_grad=True),),
        )
        for s, reads in edges.items()
    )
    graph = OpGraph(name="towers", inputs=(), ops=ops, parameters=(), buffers=(), loss="v4")
    made = Plan(
        graph=graph.fingerprint,
        planner="test",
        stages=tuple(StagePlan(ops=(op.name,)) for op in ops),
        placement=(0, 1, 2, 3, 4),
        schedule="1f1b",
        schedule_rows=(),
        microbatches=1,
    )
    rows = plan_table.plan_rows(made, graph)
    assert [(row.reads, row.depth) for row in rows] == [
        ((), 3),
        ((0,), 2),
        ((), 3),
        ((2,), 2),
        ((1, 3), 1),
    ]
    assert {row.depth for row in plan_table.plan_rows(made)} == {None}
