"""Bench of largest micro-batches: its arithmetic, and small searches against one size after another."""

from __future__ import annotations

import pytest
from dawnpiper import PLANNERS, compare_planners, least_cap, planned, planning
from layered import layered
from machine import by_roofline, changed

from pipeloom.clusters.names import find_cluster

CLUSTER = find_cluster("2 x a100-40")


def take(size: int):
    return by_roofline(layered(3, rows=size, hidden=512, length=256), CLUSTER, size)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["flush", pytest.param("stash", marks=pytest.mark.slow)])
def test_the_largest_has_a_plan_and_one_row_more_has_none(weights):
    cap = least_cap(CLUSTER, weights, "pipedream", take, 2)
    capped = changed(CLUSTER, memory_bytes=cap)
    row = compare_planners(capped, weights, take)["planners"]
    assert row["pipedream"]["batch"] == 2
    for planner in PLANNERS:
        how, most = planning(capped, weights, planner), row[planner]["batch"]
        sizes = [size for size in range(1, most + 2) if planned(how, take, size)]
        assert sizes == list(range(1, most + 1))
    assert row["dawnpiper"]["batch"] >= row["vpipe"]["batch"] >= row["pipedream"]["batch"]
