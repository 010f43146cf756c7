"""Under a larger cap no plan is slower than what was found under a smaller one."""

from dataclasses import replace

import pytest
from branching_graphs import cluster_of, random_graph
from layered import layered

from pipeloom.clusters.names import find_cluster
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.make_plan import make_plan
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.registry import planner
from pipeloom.planner.request import PlanOptions, Request
from pipeloom.planner.smaller_caps import faster_under_less
from pipeloom.profiler.roofline import roofline

SHARES = (0.53, 0.7, 0.856, 1.1)
"""Caps, of what the fullest rank holds where memory does not matter."""


@pytest.mark.parametrize(
    ("planner", "weights"), [("dawnpiper-alone", "flush"), ("probe", "2bw"), ("exact", "flush")]
)
def test_a_larger_cap_gives_no_slower_step(planner: str, weights: str) -> None:
    graph, cluster = layered(4, hidden=512, length=256, rows=8), find_cluster("4 x a100-40")
    profile = roofline(graph, cluster.devices[0])
    options = PlanOptions(weights=weights)

    def plan(cap: int, name: str):
        devices = tuple(replace(device, memory_bytes=cap) for device in cluster.devices)
        own = replace(cluster, devices=devices)
        made = make_plan(
            graph,
            profile,
            own,
            ranks=4,
            schedule="1f1b",
            microbatches=8,
            planner=name,
            options=options,
            explained=False,
        )
        assert made.caps == (cap,) * 4 and max(made.peaks) <= cap
        assert PlanCosts(graph, profile, own).simulate(made).step_s == made.predicted_step_s
        return made

    most = max(plan(1 << 50, "balanced").peaks)
    steps = [plan(int(share * most), planner).predicted_step_s for share in SHARES]
    assert all(after <= before * (1 + 1e-9) for before, after in zip(steps, steps[1:], strict=False)), steps


def cut_into_two(memory: int) -> Request:
    graph, profile = random_graph(1, 8, "chain")
    options = PlanOptions(ranks=2, schedule="1f1b", microbatches=4)
    return Request(graph, profile, cluster_of(2, memory), options, planner("balanced"))


def candidates(request: Request) -> list[Candidate]:
    """Of every cut into two, the slowest first."""
    made = (Candidate(request, request.search(), (0, at, 8)) for at in range(1, 8))
    return sorted(made, key=lambda candidate: -candidate.timeline.step_s)


def test_what_passes_the_cap_itself_is_not_taken() -> None:
    """It was, if it was faster."""
    fast = candidates(cut_into_two(1 << 40))[-1]
    tight = cut_into_two(max(map(fast.timeline.peak_bytes, range(2))) // 2)
    found = Candidate(tight, tight.search(), fast.cuts)
    assert any(found.over)
    assert faster_under_less(tight, None, lambda less: found) is None


def test_the_next_smaller_cap_is_searched_that_the_best_does_not_keep() -> None:
    """Its step was a bound there: a cut that was slower before it was moved to keep its caps was the last."""
    request = cut_into_two(1 << 40)
    slow, *_, fast = candidates(request)
    asked: list[Request] = []

    def find(less: Request) -> Candidate:
        asked.append(less)
        return fast

    best = faster_under_less(request, slow, find)
    (less,) = asked
    most = max(map(slow.timeline.peak_bytes, range(2)))
    assert most / 2 ** (1 / 4) <= less.cluster.devices[0].memory_bytes + 1 <= most
    assert less.below_s == request.below_s
    assert best is not None and best.cuts == fast.cuts
    assert faster_under_less(request, fast, lambda less: slow) is fast
