"""Bench of largest micro-batches: its arithmetic, and small searches against one size after another."""

import json

import max_batch
import pytest
from layered import layered
from max_batch import (
    PAPER,
    PLANNERS,
    cell,
    common_size,
    compared,
    estimated,
    geometric_mean,
    groups,
    largest,
    least_cap,
    planned,
    planning,
    reasons,
    with_cap,
)

from pipeloom.clusters.names import find_cluster

CLUSTER = find_cluster("2 x a100-40")


def made(name: str, batches: dict[str, int], speeds: dict[str, dict[int, float]]) -> dict:
    rows = {
        planner: {
            "batch": batch,
            "at": {str(size): speed for size, speed in speeds.get(planner, {}).items()},
            "fullest": {
                "stage": 0,
                "stages": 4,
                "state": 0.25,
                "residuals": 0.5,
                "boundary": 0.125,
                "transient": 0.125,
            },
        }
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


def test_ratios_are_of_what_both_have_a_plan_for():
    assert common_size(ONE, ONE["planners"]) == 2 and common_size(OTHER, OTHER["planners"]) == 0
    table = compared([ONE, OTHER])
    batch = table["batch, dawnpiper / vpipe"]
    assert (batch["best"], batch["mean"], batch["cells"], batch["paper_up_to"]) == (2.0, 2.0, 2, 4.0)
    own = table["batch, dawnpiper / pipedream"]
    assert (own["best"], own["best_in"], own["cells"]) == (4.0, "one", 1)
    speed = table["speed, dawnpiper / vpipe"]  # at 4 rows and at 3
    assert (speed["best"], speed["worst"]) == (1.5, 1.25)
    assert speed["mean"] == pytest.approx((1.5 * 1.25) ** 0.5, abs=1e-3)
    assert table["speed, dawnpiper / vpipe, at everyone's size"]["best"] == 1.1
    assert set(PAPER) <= set(table)


def test_a_size_without_a_plan_is_in_no_ratio_of_speeds():
    rows = OTHER["planners"] | {"vpipe": {"batch": 3, "at": {"3": 0.0}}}
    assert "speed, dawnpiper / vpipe" not in compared([OTHER | {"planners": rows}])


def test_geometric_mean_and_groups():
    assert geometric_mean([1.0, 4.0]) == 2.0
    named = groups([ONE, OTHER])
    assert len(named["all"]) == len(named["weights flush"]) == 2 and len(named["model one"]) == 1


def test_reasons_name_what_is_in_no_ratio():
    said = reasons([ONE, OTHER])
    assert any("pipedream has none, in no ratio: other" in sentence for sentence in said)
    assert not any("times as many" in sentence for sentence in said)
    rows = ONE["planners"] | {"pipedream": ONE["planners"]["pipedream"] | {"batch": 16}}
    large = ONE | {"planners": rows | {"dawnpiper": rows["dawnpiper"] | {"batch": 40}}}
    assert any("2.50 times as many" in sentence for sentence in reasons([large]))


def take(size: int):
    return estimated(size, layered(3, rows=size, hidden=512, length=256), CLUSTER)


@pytest.mark.parametrize("weights", ["flush", pytest.param("stash", marks=pytest.mark.slow)])
def test_the_largest_has_a_plan_and_one_row_more_has_none(weights):
    cap = least_cap(CLUSTER, weights, "pipedream", take, 2)
    capped = with_cap(CLUSTER, cap)
    assert largest(planning(capped, weights, "pipedream"), take, 1).microbatch_size == 2
    row = cell(capped, weights, take)["planners"]
    for planner in PLANNERS:
        how, most = planning(capped, weights, planner), row[planner]["batch"]
        sizes = [size for size in range(1, most + 2) if planned(how, take, size)]
        assert sizes == list(range(1, most + 1))
        assert row[planner]["fullest"]["filled"] <= 1
    assert row["dawnpiper"]["batch"] >= row["vpipe"]["batch"] >= row["pipedream"]["batch"]


def test_a_second_call_goes_on_with_what_is_missing(monkeypatch, tmp_path):
    asked = []

    def apart(kind: str, model: str, *rest: str) -> dict:
        asked.append((kind, *rest[:-1]))
        if kind == "check":
            return {"captured_again": {"code": max_batch.code()}}
        if kind == "capture":
            return {"ops": 1}
        count, weights, cap, _ = rest
        known = {"devices": int(count), "weights": weights, "cap": cap, "code": max_batch.code()}
        return ONE | {"name": " ".join(rest[:3])} | known

    monkeypatch.setattr(max_batch, "apart", apart)
    monkeypatch.setattr(max_batch, "row_of", lambda made: made["name"])
    record = max_batch.Record(tmp_path / "results.json")
    max_batch.simulate_all(record, ["bert"], [4, 8], 2, minutes=1)
    every = max_batch.keys([4, 8])
    assert len(every) == 8 and [cap for *_, cap in every[:4]] == [max_batch.FULL] * 4
    row = record.read()["simulated"]["bert"]
    assert [(c["devices"], c["weights"], c["cap"]) for c in row["cells"]] == every
    assert sum(kind == "cell" for kind, *_ in asked) == 8 and "captured_again" in row

    row["cells"].pop(3)
    row["cells"][5]["code"] = "older"
    lost = [every[3], every[6]]
    record.target.write_text(json.dumps(record.read() | {"simulated": {"bert": row}}))
    asked.clear()
    max_batch.simulate_all(record, ["bert"], [4, 8], 1, minutes=0)
    assert not asked and len(record.read()["simulated"]["bert"]["cells"]) == 6
    max_batch.simulate_all(record, ["bert"], [4, 8], 1, minutes=1)
    assert [(int(c), w, k) for kind, *rest in asked if kind == "cell" for c, w, k in [rest[:3]]] == lost
    assert len(record.read()["simulated"]["bert"]["cells"]) == 8
    assert record.read()["compared"]["all"]["batch, dawnpiper / vpipe"]["cells"] == 8
