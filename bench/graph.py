"""Stages as a DAG against stages as a chain. Writes bench/results/graph.json.

    python bench/graph.py                    everything, about 70 minutes on two cores
    python bench/graph.py --only brute       one part: models, launches, case, order, random, brute, huge
    python bench/graph.py --only models --keys "mmt 8" --minutes 7 --again

Results are written as they come, and a part goes on where it was left; `--again` begins it anew, with
`--keys` these keys only.

models   MMT, DLRM and CANDLE-Uno of published size (branching.py) on 4, 8, 16 and 32 V100s of 16 GB, by
         roofline: `graphpipe`, the best chain (`--no-branches`), `pipedream-graph` and `piper`; chains also
         as sequential pipelines, in which every stage waits for the one before it, too (the paper's
         baseline, and what systems do that hand values on from stage to stage). Each with its best number
         of pipelines side by side and rows per micro-batch, all of the same cells; and the DAG in that cell
         of the others: what parallel stages alone gain. On 32 devices three numbers of rows per micro-batch
         are tried, those around the fastest on fewer devices. Rows per step grow with the devices, as in the
         paper, whose numbers of rows are lost but for MMT on 8 (128 rows).
launches MMT on 8 and 32, one pipeline, where each kernel takes longer besides its work than a V100's 4 us.
case     The paper's case study on 8 V100s, one pipeline; and under caps that the DAG just keeps to.
order    MMT whose towers run in turn against MMT whose towers run one after another.
random   Random graphs (chains, series-parallel, others) under caps of 1.0 to 1.3 times the least: the step
         against that of `exact` and of the best chain.
brute    Random series-parallel graphs of 5 to 8 ops in 2 to 4 stages against every convex partition.
huge     Four towers of 9,984 ops on 8 and 32 devices, every residual kept: processor seconds, and the
         bottleneck against perfect division and `exact`.

Everything is simulated. The paper measured on Summit: up to 1.6 times the throughput of the best chain,
parallel stages alone 1.12 to 1.40 times on 32 devices; case study depth 4 against 8, 1.2 times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import branching
from graph_models import (
    FIRST_SIZE,
    Cell,
    cluster_of,
    figures_at,
    launches,
    models,
    models_at,
    plan_of,
    widths_and_sizes,
)
from layered import layered_towers
from machine import describe_machine

ROOT = Path(__file__).parent
sys.path.append(str(ROOT.parent / "tests" / "support"))

from branching_graphs import KINDS, best_of_all, random_graph, request_for, step_s  # noqa: E402

from pipeloom import api  # noqa: E402
from pipeloom.clusters import find_cluster  # noqa: E402
from pipeloom.ir.cluster import Cluster  # noqa: E402
from pipeloom.planner import PlanOptions, ProfiledModel, make_plan  # noqa: E402
from pipeloom.profiler import roofline  # noqa: E402

RESULTS = ROOT / "results" / "graph.json"
Found: TypeAlias = dict[str, Any]
"""The results of a part: what is known already is given to it, and stays."""


def case(found: Found) -> Iterator[Found]:
    """The case study, two branches, joined, on 8 devices, after each size of micro-batches."""
    found.setdefault("rows", 128)
    at, kinds = models_at("case_study"), ("graphpipe", "chain")
    for _ in widths_and_sizes(found, cluster_of(8), FIRST_SIZE["case_study"], at, kinds, widths=False):
        yield found
    print("case study:", json.dumps(found["best"]), flush=True)
    # The same under caps that the DAG just keeps to, with micro-batches of each size. Planners count messages
    # by a bound: a cap of just a plan's peak does not give that plan again.
    for key in sorted(found["cells"], key=lambda key: -found["cells"][key]["graphpipe"]["peak_bytes"]):
        capped(found, round(1.03 * found["cells"][key]["graphpipe"]["peak_bytes"]), at, kinds)
        yield found


def capped(
    found: Found, cap_bytes: int, at: Callable[[int, Cluster], ProfiledModel], kinds: Sequence[str]
) -> None:
    """The case study under a cap per device: step of each kind by rows of a micro-batch, and the shortest."""
    cluster = cluster_of(8)
    devices = tuple(replace(device, memory_bytes=cap_bytes) for device in cluster.devices)
    cluster = replace(cluster, devices=devices)
    row: Found = {kind: {} for kind in kinds}
    for key in found["cells"]:
        size = Cell(*map(int, key.split(" x "))).size
        for kind, figures in figures_at(
            Cell(1, size), cluster, found["rows"], at(size, cluster), kinds, {}
        ).items():
            row[kind][str(size)] = figures["step_s"]
    best = {kind: min(row[kind].values(), default=None) for kind in kinds}
    found.setdefault("capped", {})[str(cap_bytes)] = {**row, "best": best}
    print(f"case study under {cap_bytes / 2**30:.3f} GiB:", json.dumps(row), flush=True)


def order(found: Found) -> Iterator[Found]:
    """Seconds of a step of MMT on 8 devices, its towers one after another and in turn."""
    for name in ("mmt", "mmt_in_turn"):
        graph, cluster = api.capture(branching.PUBLISHED[name](), 4).graph, cluster_of(8)
        model = ProfiledModel(size=4, graph=graph, profiles=api.estimate(graph, cluster))
        found[name] = plan_of("graphpipe", cluster, 128, model).predicted_step_s
    print("order:", found, flush=True)
    yield found


def at_random(found: Found, count: int = 200) -> Iterator[Found]:
    """Whether `graphpipe` is ever slower than the others, after each graph."""
    found = {"graphs": 0, "planned": 0, "faster": 0, "slower": []} | found
    for seed in range(found["graphs"], count):
        dice = random.Random(seed)
        graph, profile = random_graph(seed, dice.randint(6, 40), KINDS[seed % 3])
        how = request_for(graph, profile, dice.randint(2, 6), slack=dice.uniform(1, 1.3))
        dag = step_s(how)
        other = min(step_s(how, "exact"), step_s(how, branches=False))
        found["graphs"] += 1
        found["planned"] += dag < float("inf")
        found["faster"] += dag < other * (1 - 1e-6)
        if dag > other * (1 + 1e-6):
            found["slower"].append(seed)
        yield found
    print("random:", json.dumps(found), flush=True)


def brute(found: Found, count: int = 500) -> Iterator[Found]:
    """Plans against the best of all convex partitions, after each graph. misses: seed -> ratio."""
    found = {"graphs": 0, "with_a_plan": 0, "no_plan_found": 0, "misses": {}} | found
    for seed in range(found["graphs"], count):
        dice = random.Random(seed + 10**6)
        ops, stages = dice.randint(5, 8), dice.randint(2, 4)
        graph, profile = random_graph(seed, ops, "series-parallel")
        how = request_for(graph, profile, stages, slack=dice.choice([None, 1.0, 1.1, 1.3]))
        planned = step_s(how)
        least = best_of_all(how, stages, below=planned)
        found["graphs"] += 1
        found["with_a_plan"] += least < float("inf")
        if least < float("inf") and planned == float("inf"):
            found["no_plan_found"] += 1
        elif least < float("inf") and planned > least * (1 + 1e-9):
            found["misses"][str(seed)] = planned / least
        missed = found["no_plan_found"] + len(found["misses"])
        found["optimal"] = found["with_a_plan"] - missed
        found["share"] = found["optimal"] / max(1, found["with_a_plan"])
        found["worst_ratio"] = max(found["misses"].values(), default=1.0)
        yield found
    print("brute:", json.dumps(found), flush=True)


def huge(found: Found) -> Iterator[Found]:
    """Seconds to plan a graph of 10,000 ops, after each number of devices."""
    graph = layered_towers(4, 208)
    for devices in (8, 32):
        cluster = find_cluster(f"{devices} x v100-32 with 640GiB")
        profile = roofline(graph, cluster.devices[0])
        options = PlanOptions(treatments=())
        begin = time.process_time()
        plan = make_plan(
            graph,
            profile,
            cluster,
            stages=devices,
            schedule="1f1b",
            microbatches=2 * devices,
            strategy="graphpipe",
            options=options,
        )
        took = time.process_time() - begin
        ideal = sum(cost.forward_s + cost.backward_s for cost in profile.costs.values()) / devices
        row = {
            "ops": len(graph.ops),
            "processor_s": took,
            "bottleneck_over_ideal": max(part.turn_s for part in plan.stages) / ideal,
            "notes": dict(plan.notes),
        }
        found[str(devices)] = row
        print(f"huge on {devices}:", json.dumps(row), flush=True)
        yield found


def write(part: str, found: Found) -> None:
    """Put one part into the results, which another process may have changed meanwhile."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    fresh = RESULTS.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(known | {part: found}, indent=1) + "\n")
    fresh.replace(RESULTS)  # at once, so that nobody reads half of it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", nargs="+", default=(), help='of models and launches, such as "mmt 8"')
    run: dict[str, Callable[[Found], Iterator[Found]]] = {
        "models": lambda found: models(found, options.keys),
        "launches": lambda found: launches(found, options.keys),
        "case": case,
        "order": order,
        "random": at_random,
        "brute": brute,
        "huge": huge,
    }
    parser.add_argument("--only", choices=tuple(run), nargs="+", default=tuple(run))
    parser.add_argument("--again", action="store_true", help="forget what the results have")
    parser.add_argument("--minutes", type=float, help="stop each part after so many")
    options = parser.parse_args()
    for part in options.only:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        found = known.get(part, {})
        if options.again:
            found = {key: row for key, row in found.items() if options.keys and key not in options.keys}
        end = time.monotonic() + 60 * (options.minutes or float("inf"))
        for done in run[part](found):
            write(part, {**done, "machine": describe_machine()})
            if time.monotonic() > end:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
