"""How far the greedy memory optimisation of a stage is from the best choice, and how long both take.

    python bench/memopt.py [--random 200] [--limit 30] [--families gpt2 bert llama t5 mixtral convnet]

What the exact one has not found after its limit (--limit) is the greedy choice: such cases count
as `unproven`. Random stages (tests/support/random_stages.py) and stages of captured models, under caps
between what they hold with everything kept and the least that the greedy reaches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from machine import print_stamp, print_table

from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions, static_memory
from pipeloom.planner.treatments.choose import treat_interval
from pipeloom.planner.treatments.greedy import choose_greedily
from pipeloom.profiler.roofline import roofline

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import random_stages  # noqa: E402
from exact_treatments import LIMIT_S, exact  # noqa: E402

FAMILIES = ("gpt2", "bert", "llama", "t5", "mixtral", "convnet")
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where a cap lies between the least that a stage can hold (0) and all (1)."""

Case = tuple[str, CostModel, int, int, int]
"""(name, model, start, end, micro-batches in flight)"""


def random_cases(count: int) -> Iterator[Case]:
    for seed in range(count):
        ops = 10 + 5 * (seed % 20)
        model = random_stages.random_model(seed, ops, host_bytes_per_s=(5.0, 40.0, 200.0)[seed % 3])
        yield f"random {seed}", model, 0, ops - 1, 1 + seed % 8


def family_cases(families: list[str]) -> Iterator[Case]:
    """Halves and quarters of small models; the link carries a part of the residuals in time."""
    import zoo

    from pipeloom.tracer.capture import capture

    for name in families:
        graph = capture(zoo.job(name), 2).graph
        device = replace(cpu_cluster(1).devices[0], host_link=Link(bandwidth_bytes_per_s=5e7))
        cluster = Cluster(devices=(device,) * 8, within_node=Link(bandwidth_bytes_per_s=2e9))
        profile = roofline(graph, device)
        model = CostModel(graph, [profile] * 8, cluster, CostOptions(microbatches=16))
        ops = len(model)
        for start, end in ((0, ops // 2), (ops // 4, ops // 2), (ops // 2, 3 * ops // 4)):
            for in_flight in (1, 4):
                yield f"{name} [{start}, {end})", model, start, end, in_flight


def rows_of(case: Case, limit_s: float) -> Iterator[dict[str, Any]]:
    name, model, start, end, in_flight = case
    free = treat_interval(model, start, end, 0, in_flight=in_flight, cap=inf)
    footprint, _ = model.row(start, np.array([end]))
    parts = static_memory(footprint, model.options, in_flight).values()
    static = float(np.sum([np.ravel(part)[0] for part in parts]) + np.ravel(footprint.step)[0])
    least = treat_interval(model, start, end, 0, in_flight=in_flight, cap=static).peak_bytes
    for share in SHARES:
        cap = least + share * (free.peak_bytes - least)
        row: dict[str, Any] = {
            "case": name,
            "ops": end - start,
            "in_flight": in_flight,
            "share": share,
            "free_s": free.seconds,
        }
        for method, solve in (("greedy", choose_greedily), ("exact", partial(exact, limit_s=limit_s))):
            began = time.perf_counter()
            found = treat_interval(model, start, end, 0, in_flight=in_flight, cap=cap, solve=solve)
            row[f"{method}_took_s"] = time.perf_counter() - began
            row[f"{method}_s"] = found.seconds if found.fits else None
            row[f"{method}_treated"] = len(found.treatments)
        row["proven"] = row["exact_took_s"] < limit_s
        yield row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Gaps in the stage's time, and in what is exposed of it, where both found a choice."""
    known = [r for r in rows if r["proven"]]
    both = [r for r in known if r["greedy_s"] is not None and r["exact_s"] is not None]
    gaps = [r["greedy_s"] / r["exact_s"] - 1 for r in both]
    exposed = [
        (r["greedy_s"] - r["exact_s"]) / (r["exact_s"] - r["free_s"])
        for r in both
        if r["exact_s"] > r["free_s"] * (1 + 1e-9)
    ]
    return {
        "cases": len(rows),
        "unproven": len(rows) - len(known),
        "both_fit": len(both),
        "only_exact_fits": sum(r["greedy_s"] is None and r["exact_s"] is not None for r in known),
        "only_greedy_fits": sum(r["exact_s"] is None and r["greedy_s"] is not None for r in known),
        "stage_time_gap_mean": mean(gaps or [0.0]),
        "stage_time_gap_worst": max(gaps, default=0.0),
        "greedy_is_best": sum(gap <= 1e-6 for gap in gaps),
        "exposed": len(exposed),
        "exposed_gap_mean": mean(exposed or [0.0]),
        "exposed_gap_worst": max(exposed, default=0.0),
        "greedy_took_s_median": median(r["greedy_took_s"] for r in rows),
        "exact_took_s_median": median(r["exact_took_s"] for r in rows),
    }


def growth() -> list[dict[str, Any]]:
    """Time of the greedy on random stages of more and more ops."""
    found = []
    for ops in (100, 200, 400, 800, 1600, 3200):
        model = random_stages.random_model(1, ops)
        free = treat_interval(model, 0, ops - 1, 0, in_flight=8, cap=inf)
        took = []
        for _ in range(5):
            began = time.perf_counter()
            made = treat_interval(model, 0, ops - 1, 0, in_flight=8, cap=0.6 * free.peak_bytes)
            took.append(time.perf_counter() - began)
        found.append({"ops": ops, "treated": len(made.treatments), "took_s": min(took)})
    return found


def main(count: int, families: list[str], limit_s: float) -> None:
    kinds = {"random": list(random_cases(count)), "models": list(family_cases(families))}
    rows = {kind: [row for case in cases for row in rows_of(case, limit_s)] for kind, cases in kinds.items()}
    print_stamp()
    print_table([{"stages": kind, **summary(cases)} for kind, cases in rows.items()])
    print_table(growth(), "Seconds of the greedy choice")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="of the exact, in seconds")
    given = parser.parse_args()
    main(given.random, given.families, given.limit)
