"""Under a larger cap no plan is slower than what was found under a smaller one."""

from dataclasses import replace

import pytest
from layered import layered

from pipeloom.clusters.names import find_cluster
from pipeloom.planner.make_plan import make_plan
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.request import PlanOptions
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
