"""Planners against the exact one, and how long they search. Prints JSON per part.

    python bench/planners.py                 everything, in processes of their own
    python bench/planners.py --only graphs   one part: chains, graphs, growth, llama

chains  500 tight synthetic chains (tests/support/chains.py: 2, 3, 4, 5, 8 stages, activations that follow
        times or do not, caps 1.0 to 1.3 times the smallest that has a plan): plans found, ratio to the best,
        stages weighed. Also without the widening of the theorem's interval, and with transfers.
        1 minute.
graphs  500 random graphs with the real cost and memory model, tensors recomputed and offloaded, 2 to 5
        stages, caps 1.0 to 1.3 times the smallest found; half with transfers that cost time. Planners against
        the exact one, and PipeDream's programme for the time that it takes. 8 minutes.
growth  processor seconds over 100 to 10,000 ops on 8 devices, under a cap where residuals must be freed.
        20 minutes, most of them for 10,000 ops.
llama   a 70B-parameter Llama on 64 devices, captured on fake tensors, at op granularity; and again where no
        kernel has been compiled yet. 3 minutes.

Minutes are of one core. A part is measured in pieces, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

ROOT = Path(__file__).parent
sys.path.append(str(ROOT.parent / "tests" / "support"))

import chains  # noqa: E402
from layered import layered  # noqa: E402
from machine import print_stamp  # noqa: E402
from random_stages import random_model  # noqa: E402

from pipeloom.clusters.names import find_cluster  # noqa: E402
from pipeloom.ir.cluster import Cluster, Link  # noqa: E402
from pipeloom.planner.refusals import least_share  # noqa: E402
from pipeloom.planner.registry import PLANNERS  # noqa: E402
from pipeloom.planner.search.cut_search import Search  # noqa: E402
from pipeloom.planner.search.problem import Partition, Problem  # noqa: E402
from pipeloom.planner.stage_cost.model import CostModel  # noqa: E402
from pipeloom.planner.stage_cost.peak_memory import CostOptions  # noqa: E402
from pipeloom.planner.strategies.dawnpiper import binary_partition  # noqa: E402
from pipeloom.planner.strategies.probe import parametric_search  # noqa: E402
from pipeloom.profiler.roofline import roofline  # noqa: E402

BOTH = ("recompute", "offload")
STAGES = (2, 3, 4, 5, 8)
EACH = 50
SEARCHES: dict[str, Callable[[Problem], Partition]] = {
    "dawnpiper": binary_partition,
    "probe": parametric_search,
    "interval only, w=0": lambda problem: binary_partition(problem, width=0, widen=False),
    "interval only, w=1": lambda problem: binary_partition(problem, width=1, widen=False),
    "interval only, w=2": lambda problem: binary_partition(problem, width=2, widen=False),
}


def summary(ratios: Sequence[float], weighed: Sequence[int]) -> dict[str, Any]:
    """What is said of one planner: cases, plans found, ratios of those found, stages weighed."""
    found = [ratio for ratio in ratios if ratio < inf]
    return {
        "cases": len(ratios),
        "found": len(found),
        "within_5_percent": sum(r <= 1.05 for r in found),
        "mean_ratio": round(mean(found), 6) if found else None,
        "worst_ratio": round(max(found), 6) if found else None,
        "weighed_on_average": round(mean(weighed), 1),
    }


# --- chains ---------------------------------------------------------------------------------------


def drawn(rng: random.Random, *, transfers: bool) -> Iterator[chains.Chain]:
    for stages in STAGES:
        for mixed in (False, True):
            for _ in range(EACH):
                nodes = 24 if stages == 2 else 28
                chain = chains.tight(rng, chains.draw(rng, nodes=nodes, stages=stages, mixed=mixed))
                if transfers:
                    average = sum(chain.times) / stages
                    inner = (rng.uniform(0.0, 3 * average) for _ in chain.times[1:])
                    chain = replace(chain, crossing_s=(0.0, *inner, 0.0))
                yield chain


def on_chains() -> dict[str, Any]:
    results = {}
    for transfers in (False, True):
        ratios: dict[str, list[float]] = {name: [] for name in SEARCHES}
        weighed: dict[str, list[int]] = {name: [] for name in SEARCHES}
        for chain in drawn(random.Random(0), transfers=transfers):
            best = chains.oracle(chain).seconds
            for name, search in SEARCHES.items():
                problem = chain.problem()
                ratios[name].append(search(problem).seconds / best)
                weighed[name].append(problem.evaluate.asked)  # type: ignore[attr-defined]
        key = "with transfers" if transfers else "without transfers"
        results[key] = {name: summary(ratios[name], weighed[name]) for name in SEARCHES}
    return results


# --- graphs ---------------------------------------------------------------------------------------

GRAPHS, PIECE = 500, 25


def random_graph(rng: random.Random) -> Search:
    """With no cap: of a graph of ops drawn one by one, or of a small transformer of random sizes."""
    stages, slow = rng.choice((2, 3, 4, 5)), rng.random() < 0.5
    if rng.random() < 0.5:
        model = random_model(
            rng.randrange(10**6), rng.randint(16, 28), host_bytes_per_s=rng.choice((5, 40, 200))
        )
        link = Link(bandwidth_bytes_per_s=10 ** rng.uniform(1, 3) if slow else 1e15)
        graph, profile, options = model.graph, model.profile, model.options
        cluster = Cluster(devices=model.cluster.devices[:stages], within_node=link)
    else:
        graph = layered(
            rng.randint(1, 2),
            hidden=128 * rng.randint(2, 12),
            length=128 * rng.randint(1, 12),
            rows=rng.randint(1, 8),
        )
        cluster = find_cluster(f"{stages} x a100-40")
        link = Link(bandwidth_bytes_per_s=10 ** rng.uniform(9, 11) if slow else 1e18)
        cluster, profile = replace(cluster, within_node=link), roofline(graph, cluster.devices[0])
        options = CostOptions(microbatches=4 * stages)
    costs = CostModel(graph, [profile] * stages, cluster, options)
    return Search(model=costs, caps=(1 << 50,) * stages, in_flight=tuple(range(stages, 0, -1)))


def capped(search: Search, factor: float, treatments: tuple[Any, ...] = BOTH) -> Search:
    """Under caps of `factor` times the smallest with which a plan is known."""
    share, _ = least_share(replace(search, treatments=treatments))
    caps = tuple(int(cap * share * factor) for cap in search.caps)
    return replace(search, caps=caps, treatments=treatments)


class Timing(NamedTuple):
    """What one planner made of a case: seconds of the slowest stage, stages weighed, processor seconds."""

    slowest_s: float
    weighed: int
    cpu_s: float


def timing(search: Search, name: str) -> Timing:
    own = replace(search, known={})  # what others have weighed is not known
    begin = time.process_time()
    cuts = PLANNERS[name].find(own)
    spent = time.process_time() - begin
    weighed = own.evaluate.asked  # type: ignore[attr-defined]
    if not cuts:
        return Timing(inf, weighed, spent)
    stages = [own.evaluate(i, j, s) for s, (i, j) in enumerate(pairwise(cuts))]
    return Timing(max(stage.seconds for stage in stages), weighed, spent)


def on_graphs(first: int) -> list[dict[str, Any]]:
    """Some cases: whether transfers cost time, and what each planner made of them."""
    rows = []
    for seed in range(first, first + PIECE):
        rng = random.Random(seed)
        treatments = rng.choice((BOTH, BOTH, BOTH[:1]))
        factor = rng.uniform(1.0, 1.3)
        search = random_graph(rng)
        tight = capped(search, factor, treatments)
        made = {name: timing(tight, name) for name in ("exact", "dawnpiper", "probe", "vpipe", "pipedream")}
        rows.append({"seed": seed, "transfers": search.slowest_link < 1e12, "made": made})
    return rows


def graphs_summary(pieces: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    rows = [
        {**row, "made": {name: Timing(*made) for name, made in row["made"].items()}}
        for piece in pieces
        for row in piece
    ]
    known = [row for row in rows if row["made"]["exact"].slowest_s < inf]
    result: dict[str, Any] = {"cases": len(rows), "exact_found": len(known)}
    kinds = {"without transfers": False, "with transfers": True}
    for kind, transfers in kinds.items():
        own = [row for row in known if row["transfers"] == transfers]
        result[kind] = {
            name: summary(
                [row["made"][name].slowest_s / row["made"]["exact"].slowest_s for row in own],
                [row["made"][name].weighed for row in own],
            )
            for name in ("dawnpiper", "probe", "vpipe")
        }
    result["mean_cpu_s"] = {
        name: round(mean(row["made"][name].cpu_s for row in rows), 4) for name in rows[0]["made"]
    }
    result["off"] = [
        {"seed": row["seed"], "planner": name, "ratio": round(ratio, 4) if ratio < inf else None}
        for row in known
        for name in ("dawnpiper", "probe")
        if (ratio := row["made"][name].slowest_s / row["made"]["exact"].slowest_s) > 1.01
    ]
    return result


# --- growth ---------------------------------------------------------------------------------------


def search_of(layers: int, stages: int, rows: int = 4) -> Search:
    """Of a transformer graph on A100 cards, with no cap, every residual kept."""
    graph = layered(layers, rows=rows)
    cluster = find_cluster(f"{stages} x a100-40")
    profile = roofline(graph, cluster.devices[0])
    model = CostModel(graph, [profile] * stages, cluster, CostOptions(microbatches=4 * stages))
    return Search(model=model, caps=(1 << 50,) * stages, in_flight=tuple(range(stages, 0, -1)))


def on_growth(layers: int) -> dict[str, Any]:
    """One size, in this process."""
    search = search_of(layers, 8)
    share = search.smallest()[0]
    freed = least_share(replace(search, treatments=BOTH))[0]
    caps = tuple(int(cap * (share + freed) / 2) for cap in search.caps)
    row: dict[str, Any] = {"ops": len(search.model), "cap_bytes": caps[0]}
    for name in ("probe", "dawnpiper", "pipedream", "exact, all kept"):
        planner = name.split(",")[0]
        freeing = BOTH if planner in ("probe", "dawnpiper") else ()
        own = replace(search, caps=caps if freeing else search.caps, treatments=freeing)
        if planner == "exact":
            own = replace(own, caps=tuple(int(cap * share * 1.1) for cap in search.caps))
        seconds, weighed, spent = timing(own, planner)
        row[name] = {"cpu_s": round(spent, 2), "weighed": weighed, "slowest_stage_s": seconds}
    row["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


# --- llama ----------------------------------------------------------------------------------------


def on_llama(layers: int, stages: int, planner: str) -> dict[str, Any]:
    """Capture, profile by roofline, plan."""
    from llama_70b import job

    from pipeloom import capture
    from pipeloom.planner.make_plan import make_plan
    from pipeloom.planner.request import PlanOptions

    begin = time.perf_counter()
    graph = capture(job(layers=layers), 1).graph
    captured = time.perf_counter()
    nodes = -(-stages // 8)
    cluster = find_cluster(f"{nodes} nodes of 8 x h100" if nodes > 1 else f"{stages} x h100")
    profile = roofline(graph, cluster.devices[0])
    profiled, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(
        graph,
        profile,
        cluster,
        ranks=stages,
        schedule="1f1b",
        microbatches=2 * stages,
        planner=planner,
        options=PlanOptions(),
    )
    return {
        "planner": planner,
        "ops": len(graph.ops),
        "stages": stages,
        "parameters": sum(p.bytes for p in graph.parameters) // 4,
        "capture_s": round(captured - begin, 1),
        "profile_s": round(profiled - captured, 1),
        "plan_s": round(time.perf_counter() - profiled, 1),
        "plan_cpu_s": round(time.process_time() - cpu, 1),
        "cpu_s": round(time.process_time(), 1),
        "predicted_step_s": plan.predicted_step_s,
        "recomputed_bytes": sum(s.recomputed_bytes for s in plan.stages),
        "offloaded_bytes": sum(s.offloaded_bytes for s in plan.stages),
        "fullest": max(s.memory.total / cap for s, cap in zip(plan.stages, plan.caps, strict=True)),
    }


# --- pieces ---------------------------------------------------------------------------------------

LAYERS = (8, 25, 83, 250, 833)
FRESH = "fresh"
"""Last argument of a piece that finds no compiled kernels."""

PIECES: dict[str, list[tuple[str, ...]]] = {
    "chains": [("chains",)],
    "graphs": [("graphs", str(first)) for first in range(0, GRAPHS, PIECE)],
    "growth": [("growth", str(layers)) for layers in LAYERS],
    "llama": [
        ("llama", "80", "64", "probe"),
        ("llama", "80", "64", "dawnpiper"),
        ("llama", "80", "64", "dawnpiper", FRESH),
    ],
}
SUMMARIES: dict[str, Callable[[list[Any]], Any]] = {
    "chains": lambda pieces: pieces[0],
    "graphs": graphs_summary,
    "growth": list,
    "llama": list,
}


def measured(kind: str, *rest: str) -> Any:
    """One piece, in this process."""
    return {
        "chains": on_chains,
        "graphs": lambda: on_graphs(int(rest[0])),
        "growth": lambda: on_growth(int(rest[0])),
        "llama": lambda: {**on_llama(int(rest[0]), int(rest[1]), rest[2]), "first_use": FRESH in rest},
    }[kind]()


def apart(piece: Sequence[str]) -> Any:
    """One piece, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **({"NUMBA_CACHE_DIR": folder} if FRESH in piece else {})}
        call = [sys.executable, __file__, "--one", *piece]
        done = subprocess.run(call, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=tuple(PIECES))
    parser.add_argument("--one", nargs="+", help="measure one piece in this process and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one)))
        return 0
    print_stamp()
    for part in [options.only] if options.only else PIECES:
        pieces = []
        for piece in PIECES[part]:
            begin = time.perf_counter()
            pieces.append(apart(piece))
            print(*piece, f"{time.perf_counter() - begin:.0f} s", flush=True)
        print(json.dumps(SUMMARIES[part](pieces)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
