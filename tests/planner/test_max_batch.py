"""Bench of largest micro-batches: its arithmetic, and small searches against one size after another."""

from __future__ import annotations

import pytest
from dawnpiper import PLANNERS, common_size, compare_planners, compared, least_cap, planned, planning
from layered import layered
from machine import by_roofline, changed

from pipeloom.clusters.names import find_cluster

CLUSTER = find_cluster("2 x a100-40")


def made(name: str, batches: dict[str, int], speeds: dict[str, dict[int, float]]) -> dict:
    rows = {
        planner: {"batch": batch, "at": {str(n): speed for n, speed in speeds.get(planner, {}).items()}}
        for planner, batch in batches.items()
    }
    return {"name": name, "model": name, "weights": "flush", "cap": "x1.0", "devices": 4, "planners": rows}


ONE = made(
    "one",
    {"pipedream": 2, "vpipe": 4, "dawnpiper": 8, "probe": 8},
    {
        "pipedream": {2: 10.0},
        "vpipe": {2: 10.0, 4: 8.0},
        "dawnpiper": {2: 11.0, 4: 12.0, 8: 9.0},
        "probe": {2: 11.0, 8: 9.0},
    },
)


OTHER = made(
    "other",
    {"pipedream": 0, "vpipe": 3, "dawnpiper": 6, "probe": 5},
    {"vpipe": {3: 4.0}, "dawnpiper": {3: 5.0, 5: 4.0, 6: 3.0}, "probe": {5: 4.0}},
)


def ratios(*cells: dict) -> dict[str, dict]:
    return {row["ratio"]: row for row in compared(cells) if row["cells of"] == "all"}


def test_ratios_are_of_what_both_have_a_plan_for():
    assert common_size(ONE, ONE["planners"]) == 2 and common_size(OTHER, OTHER["planners"]) == 0
    table = ratios(ONE, OTHER)
    batch = table["batch, dawnpiper / vpipe"]
    assert (batch["best"][0], batch["mean"], batch["cells"]) == (2.0, pytest.approx(2.0), 2)
    own = table["batch, dawnpiper / pipedream"]
    assert (own["best"], own["cells"]) == ((4.0, "one"), 1)
    speed = table["speed, dawnpiper / vpipe"]  # at 4 rows and at 3
    assert (speed["best"][0], speed["least"][0]) == (1.5, 1.25)
    assert speed["mean"] == pytest.approx((1.5 * 1.25) ** 0.5)
    assert table["speed, dawnpiper / vpipe, at everyone's size"]["best"][0] == 1.1
    rows = OTHER["planners"] | {"vpipe": {"batch": 3, "at": {"3": 0.0}}}
    assert "speed, dawnpiper / vpipe" not in ratios(OTHER | {"planners": rows})


def take(size: int):
    return by_roofline(layered(3, rows=size, hidden=512, length=256), CLUSTER, size)


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
