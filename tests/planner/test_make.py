"""make_plan from graph to plan file, what it refuses, and the rows of a plan's table."""

from dataclasses import replace

import pytest
from random_ops import op_chain
from small import alike

from pipeloom.ir.cluster import Cluster, Device, GiB, Link
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan, StagePlan, load_plan
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.planner.plan_table import plan_rows
from pipeloom.planner.planners import make_plan
from pipeloom.planner.refusals import NoCutFits, stage_needs
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.search.cut_search import Search
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions

SIZE = 1000  # numbers per value and per weight: 4000 bytes


def layers(count: int, *, tied: bool = False) -> tuple[OpGraph, Profile]:
    """x -> linear -> linear ...; each 1 s forward, 2 s backward; with `tied` the last reuses w0."""
    how = {"weight": SIZE, "back": 1.0, "device": "d", "tied": tied, "x": (2, SIZE // 2)}
    graph, profile = op_chain([1.0] * count, [SIZE] * count, **how)
    return graph, replace(profile, batch=("x[2,500]float32",))


def planned(graph: OpGraph, profile, ranks: int, cluster: Cluster | None = None, **how) -> Plan:
    how = {"planner": "exact", "schedule": "1f1b", "microbatches": 4} | how
    return make_plan(graph, profile, cluster or alike(ranks, 1e9, memory=GiB), ranks=ranks, **how)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_cuts_schedules_and_predicts(schedule, split, tied, tmp_path):
    graph, profile = layers(8, tied=tied)
    plan = planned(graph, profile, 2, schedule=schedule, options=PlanOptions(split_backward=split))
    assert [len(stage.ops) for stage in plan.stages] == [4, 4]
    # M + S - 1 turns of 12 s; with the split, the first stage's last backward starts 4 s earlier, after I.
    assert plan.predicted_step_s == pytest.approx((4 + 2 - 1) * 12 - 4 * split, rel=1e-4)
    assert plan.microbatch_size == 2 and plan.batch == profile.batch
    assert plan.stage_graph(graph).tied == ({"w0": (0, 1)} if tied else {})
    in_flight = 4 if schedule == "gpipe" else 2  # of four inputs of a stage one is the batch
    assert plan.stages[0].memory.residuals == in_flight * 3 * 4 * SIZE
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("ranks", "devices", "how", "word"),
    [
        (4, 4, {}, "3 ops"),
        (3, 2, {}, "2 devices"),
        (2, 2, {"planner": "exakt"}, "exact"),
        (2, 2, {"planner": "equal", "options": PlanOptions(treatments=("recompute",))}, "every residual"),
    ],
)
def test_what_cannot_be_is_refused(ranks, devices, how, word):
    with pytest.raises(PlanError, match=word):
        planned(*layers(3), ranks, alike(devices), **how)


def test_profiles_by_device_name():
    graph, profile = layers(9)
    twice = OpCost(forward_s=2.0, input_grad_s=2.0, weight_grad_s=2.0)
    slow = replace(profile, device="slow", costs=dict.fromkeys(profile.costs, twice))
    device = Device(name="d", memory_bytes=GiB)
    cluster = replace(alike(1, 1e9), devices=(device, replace(device, name="slow")))
    plan = planned(graph, {"d": profile, "slow": slow}, 2, cluster, microbatches=2)
    assert [len(stage.ops) for stage in plan.stages] == [6, 3]
    for profiles, word in (({"d": profile}, "slow"), (layers(4)[1], "made for model")):
        with pytest.raises(PlanError, match=word):
            planned(graph, profiles, 2, cluster)


def test_infeasible_names_stage_need_cap_and_what_would_do():
    graph, profile = layers(8)
    model = CostModel(graph, [profile] * 2, alike(2), CostOptions(microbatches=4))
    search = Search(model=model, caps=(1, 1), in_flight=(2, 1))
    smallest = min(max(stage_needs(search, (0, cut, len(model)))) for cut in range(1, len(model)))

    def under(cap: int, ranks: int = 2, **how) -> Plan:
        return planned(graph, profile, ranks, alike(ranks, 1e9, memory=cap), **how)

    with pytest.raises(NoCutFits, match=r"8 ops into 2 stages .* 97.7 KiB") as caught:
        under(100_000)
    assert caught.value.stages == 4 and caught.value.share == pytest.approx(smallest / 100_000)
    assert under(smallest) and under(100_000, 4)
    # `equal` ignores memory and is refused if its cut does not fit.
    assert [len(s.ops) for s in under(GiB, planner="equal").stages] == [4, 4]
    for cap, ranks, planner, word in (
        (smallest - 1, 2, "exact", "into 2 stages"),
        (100_000, 3, "exact", "into 3 stages"),
        (smallest - 1, 2, "equal", "1 B less"),
    ):
        with pytest.raises(InfeasibleError, match=word):
            under(cap, ranks, planner=planner)


def test_equal_leaves_no_stage_empty():
    graph, profile = op_chain([100.0, 1.0, 1.0, 1.0], device="d")
    plan = planned(graph, profile, 4, microbatches=2, planner="equal")
    assert [stage.ops for stage in plan.stages] == [("op0",), ("op1",), ("op2",), ("op3",)]


def test_rows_say_which_stages_a_stage_reads_and_how_deep_it_is():
    """Two towers of two stages and a join; the ops of a stage are one op."""
    graph, profile = layers(5)
    reads = ((), ("v0",), (), ("v2",), ("v1", "v3"))
    ops = tuple(replace(op, inputs=inputs) for op, inputs in zip(graph.ops, reads, strict=True))
    towers = replace(graph, ops=ops)
    made = replace(planned(graph, profile, 5), graph=towers.fingerprint)
    found = [(row.reads, row.depth) for row in plan_rows(made, towers)]
    assert found == [((), 3), ((0,), 2), ((), 3), ((2,), 2), ((1, 3), 1)]
    assert {row.depth for row in plan_rows(made)} == {None}


LINK = Link(bandwidth_bytes_per_s=10.0)
ALONE = Device(name="card", memory_bytes=1, host_link=LINK)


def loads(*sizes: int, devices: tuple[Device, ...]) -> list[tuple[float | None, ...]]:
    """Of stages that keep so many bytes k, use of the link, and stages of the rank that may leave whole."""
    each = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0}
    stages = tuple(StagePlan(ops=(f"op{n}",), **each, kept_bytes=size) for n, size in enumerate(sizes))
    placement = tuple(n % len(devices) for n in range(len(stages)))
    how = {"graph": "g", "planner": "hand", "schedule": "", "schedule_rows": (), "microbatches": 1}
    cluster = Cluster(devices=devices, within_node=LINK, switches={"s": LINK})
    rows = plan_rows(Plan(stages=stages, placement=placement, **how), cluster=cluster)
    return [(row.offload_ratio, row.link_use, row.offloadable_stages) for row in rows]


def test_k_is_the_ratio_of_copying_to_computing() -> None:
    """3 s and 4 s of copies beside 6 s of work: one stage of each rank may leave. A link of its own is used
    half of k, one that two share all of it."""
    assert loads(30, 30, devices=(ALONE,) * 2) == [(2.0, 1.0, 1)] * 2
    found = loads(15, 15, 20, 20, devices=(replace(ALONE, switch="s"),) * 2)
    assert found == [(1.0, 1.0, 1)] * 2 + [pytest.approx((4 / 3, 4 / 3, 1))] * 2
    slow_back = replace(ALONE, host_link_back=Link(bandwidth_bytes_per_s=5.0))
    found = loads(15, 15, devices=(slow_back, replace(ALONE, host_link=None)))
    assert found == [(1.5, 1.0, 1), (None, None, None)]
