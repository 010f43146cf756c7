"""auto: the joint search against every planner with every schedule, under caps, cut short; its orders."""

import random
from dataclasses import replace
from itertools import count, pairwise, product
from math import inf

import numpy as np
import pytest
from branching_graphs import cluster_of, plan_of, random_graph, request_for
from joint_cases import PLANNERS_OF_ONE, SCHEDULES, planned, random_case, step_s, with_memory

from pipeloom.ir.action import F
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import ConfigError, PlanError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.profile import Profile
from pipeloom.plan_settings import PlanSettings
from pipeloom.planner import planners
from pipeloom.planner.joint.estimates import NEAR, CutTimes
from pipeloom.planner.joint.search_record import searched_for
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.planners import make_plan
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.searched_order import with_searched_order
from pipeloom.planning import make_request

pytestmark = pytest.mark.whole_search

FEW = ("1f1b", "zb_v", "gis_h")
"""Schedules of quick cases: in a line and in a V, with much in flight and with little."""


def cases(quick: int, *seeds: int, few: tuple[str, ...] = FEW) -> pytest.MarkDecorator:
    """A seed with few schedules, and it and others with all, which is slow."""
    whole = (pytest.param(seed, (), marks=pytest.mark.slow) for seed in (quick, *seeds))
    return pytest.mark.parametrize(("seed", "schedules"), [(quick, few), *whole])


def under(seed: int, share: float) -> tuple[OpGraph, Profile, Cluster]:
    """A case whose devices have this share of what 1F1B holds where it keeps all residuals."""
    graph, profile, cluster = random_case(seed)
    free = planned(graph, profile, cluster, "exact", "1f1b", treatments=())
    return graph, profile, with_memory(cluster, int(share * max(free.peaks)))


@cases(19, 0, 1, 2, 3, 4, 23, 40, 118, 156, 182, few=FEW[:2])
def test_no_planner_with_any_schedule_is_faster_or_finds_a_plan_alone(seed, schedules) -> None:
    case = under(seed, random.Random(seed).choice((0.7, 0.9, 1.3)))
    made = planned(*case, "auto", schedules=schedules)
    ways = [*product(PLANNERS_OF_ONE, schedules or SCHEDULES)]
    for planner, schedule in random.Random(seed).sample(ways, 6 if schedules else 60):
        theirs = planned(*case, planner, schedule)
        assert step_s(made) <= step_s(theirs) * (1 + 1e-9), (planner, schedule)
    if made is not None:
        assert PlanCosts(*case).simulate(made).step_s == pytest.approx(step_s(made))
        assert all(peak <= cap for peak, cap in zip(made.peaks, made.caps, strict=True))
        assert all(stage.turn_s < inf for stage in made.stages)
        told = searched_for(made)
        assert told is not None and told["bound_s"] <= step_s(made) * (1 + 1e-9)


@pytest.mark.slow
def test_where_no_plan_fits_without_offloading_one_that_offloads_is_found() -> None:
    named, made = (planned(*under(143, 0.7), "auto", name) for name in ("po_f", None))
    assert made is not None and any("offload" in stage.values() for stage in made.memory.stages)
    assert step_s(made) <= step_s(named) * (1 + 1e-9)


@cases(18, 1, 2, 5, 7, 182, few=FEW[:2])
def test_a_larger_cap_gives_no_slower_step(seed: int, schedules: tuple[str, ...]) -> None:
    shares = (0.8, 1.2) if schedules else (0.7, 0.8, 0.95, 1.2)
    plans = [planned(*under(seed, share), "auto", schedules=schedules) for share in shares]
    assert all(step_s(after) <= 1.001 * step_s(before) for before, after in pairwise(plans))


def test_one_seed_gives_one_plan_and_unlike_devices_get_the_best_order() -> None:
    graph, profile = random_graph(4, 10, "chain")
    slow = replace(profile, costs={n: c.scaled(3, 3) for n, c in profile.costs.items()}, device="slow")
    fast, other = (replace(cluster_of(1).devices[0], name=name) for name in ("d", "slow"))
    link = cluster_of(1).within_node
    steps = []
    for devices in ((fast, fast, other), (fast, other, fast), (other, fast, fast)):
        cluster = Cluster(devices=devices, within_node=link)
        profiles = {"d": profile, "slow": slow}
        made = [planned(graph, profiles, cluster, "auto", "1f1b") for _ in range(2)]
        assert made[0] is not None and made[0] == made[1]
        assert PlanCosts(graph, profiles, cluster).simulate(made[0]).step_s == pytest.approx(step_s(made[0]))
        steps.append(step_s(made[0]))
    assert max(steps) == pytest.approx(min(steps))


@pytest.mark.parametrize(
    ("chunks", "weights", "error", "word"),
    [(50, None, PlanError, "at most 5"), (2, "2bw", ConfigError, "--weights")],
)
def test_chunks_that_no_schedule_has_are_refused(chunks, weights, error, word) -> None:
    graph, profile = random_graph(2, 10, "chain")
    options = PlanOptions(ranks=2, chunks=chunks, weights=weights)
    with pytest.raises(error) as refused:
        make_plan(graph, profile, cluster_of(2), options)
    assert word in str(refused.value.hint)


@pytest.mark.parametrize(("ranks", "fastest"), [(1, True), (2, False)])
def test_each_rank_has_as_many_stages_as_chunks_says(ranks: int, fastest: bool) -> None:
    graph, profile = random_graph(2, 10, "chain")
    options = PlanOptions(ranks=ranks, chunks=3, fastest=fastest)
    assert len(make_plan(graph, profile, cluster_of(ranks), options).stages) == 3 * ranks


def test_a_simpler_plan_may_be_a_little_slower() -> None:
    """On shared cores eight stages, predicted to be 12 % faster than two, took 1.4 times as long."""
    graph, profile = random_graph(2, 10, "chain")
    stages = []
    for within in (0.0, 0.5):
        made = planned(
            graph, profile, cluster_of(2), "auto", schedules=("1f1b", "zb_v"), simpler_within=within
        )
        assert not stages or step_s(made) <= (1 + within) * stages[0][1]
        stages.append((len(made.stages), step_s(made), made.schedule))
        told = searched_for(made)
        assert told is not None and set(told["passed_over"]) == ({"zb_v"} if within else set())
    assert [count for count, *_ in stages] == [4, 2] and stages[1][2] == "1f1b"
    assert make_request(PlanSettings(ranks=2)).options.simpler_within > 0
    assert make_request(PlanSettings(ranks=2, cluster="2 x a100-40")).options.simpler_within == 0


def test_cuts_near_the_end_of_a_branch_are_moved_there() -> None:
    moved = 0
    for seed in range(30):
        request = request_for(*random_graph(seed, 14, "series-parallel"), 2)
        search = request.search()
        cuts = CutTimes(search, request.layout, request.microbatches)
        last = len(cuts.points) - 1
        for at in range(1, last):
            before = np.array([0, at, last])
            (cut,) = cuts.cut(cuts.at_borders(before))[1:-1]
            if cut != cuts.points[at]:
                moved += 1
                far_s = abs(cuts.middle[np.searchsorted(cuts.points, cut)] - cuts.middle[at])
                assert cut in search.borders and far_s <= NEAR * cuts.middle[-1] / 2
    assert moved


def test_cuts_between_the_places_of_a_large_graph_leave_no_stage_empty() -> None:
    graph, profile = random_graph(0, 40, "chain")
    request = request_for(graph, profile, 4)
    cuts = CutTimes(replace(request.search(), coarse=8), request.layout, request.microbatches)
    last = len(cuts.points) - 1
    assert last < 20
    for begin in range(1, 38):
        moved = cuts.places((0, begin, begin + 1, begin + 2, 40))
        assert (np.diff(moved) > 0).all() and moved[0] == 0 and moved[-1] == last


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ended", "what", "how"),
    [
        ("interrupted", {}, {"schedules": FEW}),
        ("time limit", {"time.monotonic": count(0, 10).__next__}, {"time_limit": 1}),
        ("budget spent", {"BUDGET": 8_000}, {}),
    ],
)
def test_a_search_that_is_cut_short_gives_the_best_so_far(ended, what, how, monkeypatch) -> None:
    """A limit that is over before there is a plan waits for the first one."""
    if ended == "interrupted":
        monkeypatch.setitem(planners.AXES, "cuts", interrupted)
    for name, value in what.items():
        monkeypatch.setattr(f"pipeloom.planner.joint.search.{name}", value)
    made = planned(*random_case(0), "auto", **how)
    told = searched_for(made) if made is not None else None
    assert told is not None and told["ended"] == ended
    assert ended != "time limit" or sum(told["tried"].values()) == 1


@pytest.mark.parametrize("kind", ["chain", "series-parallel"])
def test_a_searched_order_keeps_the_caps_and_is_what_is_simulated(kind: str) -> None:
    graph, profile = random_graph(3, 12, kind)
    how = request_for(graph, profile, 3, slack=1.5)
    plan = plan_of(how, "exact")
    costs = PlanCosts(graph, profile, how.cluster)
    found = with_searched_order(plan, costs)
    assert found is not None, "1f1b of uneven stages without a split backward leaves something to gain"
    assert found.schedule == "searched" and found.stages != ()
    assert found.predicted_step_s < plan.predicted_step_s
    timeline = costs.simulate(found)
    assert timeline.step_s == found.predicted_step_s
    assert all(timeline.peak_bytes(rank) == peak for rank, peak in enumerate(found.peaks))
    assert all(peak <= cap for peak, cap in zip(found.peaks, plan.caps, strict=True))
    done = [sorted(action.microbatch for action in row if action.kind == F) for row in found.as_schedule.rows]
    assert done == [list(range(plan.microbatches))] * 3


def test_orders_of_plans_without_a_flush_are_left_as_they_are() -> None:
    graph, profile = random_graph(3, 12, "chain")
    how = request_for(graph, profile, 2)
    plan = plan_of(replace(how, options=replace(how.options, weights="2bw")), "exact")
    assert with_searched_order(plan, PlanCosts(graph, profile, how.cluster)) is None


def test_the_bound_holds_for_devices_that_differ_in_other_ways_from_op_to_op() -> None:
    graph, profile = random_graph(4, 6, "chain")
    slow = {op.name: 4.0 if index < 3 else 0.25 for index, op in enumerate(graph.ops)}
    costs = {name: cost.scaled(slow[name], slow[name]) for name, cost in profile.costs.items()}
    cluster = cluster_of(2)
    devices = tuple(replace(d, name=name) for d, name in zip(cluster.devices, ("d", "other"), strict=True))
    profiles = {"d": profile, "other": replace(profile, costs=costs, device="other")}
    made = planned(graph, profiles, replace(cluster, devices=devices), "auto", "1f1b")
    told = searched_for(made) if made is not None else None
    assert told is not None and 0 < told["bound_s"] <= step_s(made)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2"])
def test_the_bound_holds_where_the_pipeline_does_not_drain(schedule: str) -> None:
    """A micro-batch takes longer from end to end than a step of one micro-batch."""
    graph, profile = random_graph(1, 8, "chain")
    options = PlanOptions(ranks=3, microbatches=1, schedule=schedule, weights="stash")
    made = make_plan(graph, profile, cluster_of(3), options)
    told = searched_for(made)
    work = sum(cost.forward_s + cost.backward_s for cost in profile.costs.values())
    assert told is not None and told["bound_s"] == pytest.approx(work / 3)
    assert told["bound_s"] <= made.predicted_step_s < work
