"""Planners against the exact one, and how long they search. Writes bench/results/planners.json.

    python bench/planners.py                 everything, in processes of their own
    python bench/planners.py --only chains   one part: chains, graphs, growth, llama

chains  500 tight synthetic chains (tests/support/chains.py: 2, 3, 4, 5, 8 stages, activations that follow
        times or do not, caps 1.0 to 1.3 times the smallest that has a plan): plans found, ratio to the best,
        stages weighed. Also without the widening of the theorem's interval, and with transfers.
graphs  transformer graphs at op granularity with tensors recomputed and offloaded, caps 1.0 to 1.3 times
        the smallest found: planners against the exact one.
growth  processor seconds over 100 to 10,000 ops on 8 devices, under a cap where residuals must be freed.
llama   a 70B-parameter Llama on 64 devices, captured on fake tensors, at op granularity.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent
sys.path.append(str(ROOT.parent / "tests" / "support"))

import chains  # noqa: E402
from layered import layered  # noqa: E402
from machine import describe_machine  # noqa: E402

from pipeloom.planner import find_cluster  # noqa: E402
from pipeloom.planner.cost import CostModel, CostOptions  # noqa: E402
from pipeloom.planner.dawnpiper import binary  # noqa: E402
from pipeloom.planner.infeasible import least_share  # noqa: E402
from pipeloom.planner.probe import fill  # noqa: E402
from pipeloom.planner.problem import Partition, Problem  # noqa: E402
from pipeloom.planner.registry import PLANNERS  # noqa: E402
from pipeloom.planner.search import Search  # noqa: E402
from pipeloom.profiler.roofline import roofline  # noqa: E402

BOTH = ("recompute", "offload")
STAGES = (2, 3, 4, 5, 8)
EACH = 50
SEARCHES: dict[str, Callable[[Problem], Partition]] = {
    "dawnpiper": binary,
    "probe": fill,
    "interval only, w=0": lambda problem: binary(problem, width=0, widen=False),
    "interval only, w=1": lambda problem: binary(problem, width=1, widen=False),
    "interval only, w=2": lambda problem: binary(problem, width=2, widen=False),
}


def summary(ratios: list[float], weighed: list[int]) -> dict[str, Any]:
    """What is said of one planner: cases, plans found, ratios of those found, stages weighed."""
    found = [ratio for ratio in ratios if ratio < inf]
    return {
        "cases": len(ratios), "found": len(found), "within_5_percent": sum(r <= 1.05 for r in found),
        "mean_ratio": round(mean(found), 6) if found else None,
        "worst_ratio": round(max(found), 6) if found else None,
        "weighed_on_average": round(mean(weighed), 1),
    }  # fmt: skip


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


def search_of(layers: int, stages: int, rows: int = 4) -> Search:
    """Of a transformer graph on A100 cards, with no cap, every residual kept."""
    graph = layered(layers, rows=rows)
    cluster = find_cluster(f"{stages} x a100-40")
    profile = roofline(graph, cluster.devices[0])
    model = CostModel(graph, [profile] * stages, cluster, CostOptions(microbatches=4 * stages))
    return Search(model=model, caps=(1 << 50,) * stages, in_flight=tuple(range(stages, 0, -1)))


def capped(search: Search, factor: float, treatments: tuple[Any, ...] = BOTH) -> Search:
    """Under caps of `factor` times the smallest with which a plan is known."""
    share, _ = least_share(replace(search, treatments=treatments))
    caps = tuple(int(cap * share * factor) for cap in search.caps)
    return replace(search, caps=caps, treatments=treatments)


def taken(search: Search, name: str) -> tuple[float, int, float]:
    """(seconds of the slowest stage, stages weighed, processor seconds) of one planner."""
    own = replace(search)
    begin = time.process_time()
    cuts = PLANNERS[name].find(own)
    spent = time.process_time() - begin
    weighed = own.evaluate.asked  # type: ignore[attr-defined]
    if not cuts:
        return inf, weighed, spent
    return max(own.evaluate(i, j, s).seconds for s, (i, j) in enumerate(pairwise(cuts))), weighed, spent


def on_graphs() -> dict[str, Any]:
    rng = random.Random(0)
    planners = ("dawnpiper", "probe", "vpipe")
    ratios: dict[str, list[float]] = {name: [] for name in planners}
    weighed: dict[str, list[int]] = {name: [] for name in planners}
    spent: dict[str, list[float]] = {name: [] for name in (*planners, "exact")}
    for layers, stages in ((3, 2), (4, 3), (5, 4)):
        search = search_of(layers, stages)
        for _ in range(4):
            tight = capped(search, rng.uniform(1.0, 1.3))
            best, _, seconds = taken(tight, "exact")
            spent["exact"].append(seconds)
            for name in planners:
                found, count, seconds = taken(tight, name)
                ratios[name].append(found / best if best < inf else inf)
                weighed[name].append(count)
                spent[name].append(seconds)
    return {
        "planners": {name: summary(ratios[name], weighed[name]) for name in planners},
        "mean_cpu_s": {name: round(mean(times), 2) for name, times in spent.items()},
    }


# --- growth ---------------------------------------------------------------------------------------


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
        seconds, weighed, spent = taken(own, planner)
        row[name] = {"cpu_s": round(spent, 2), "weighed": weighed, "slowest_stage_s": seconds}
    row["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


# --- llama ----------------------------------------------------------------------------------------


def on_llama(layers: int, stages: int, planner: str) -> dict[str, Any]:
    """Capture, profile by roofline, plan."""
    import torch
    import transformers as hf

    from pipeloom import Job, capture
    from pipeloom.planner import PlanOptions, make_plan

    config = hf.LlamaConfig(
        hidden_size=8192, num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip

    def batch(seed: int, size: int) -> dict[str, Any]:
        ids = torch.randint(0, 1000, (size, 2048), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    begin = time.perf_counter()
    job = Job(model=lambda: hf.LlamaForCausalLM(config), batch=batch, name="llama-70b")
    graph = capture(job, 1).graph
    captured = time.perf_counter()
    nodes = -(-stages // 8)
    cluster = find_cluster(f"{nodes} nodes of 8 x h100" if nodes > 1 else f"{stages} x h100")
    profile = roofline(graph, cluster.devices[0])
    profiled, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(
        graph, profile, cluster, stages=stages, schedule="1f1b", microbatches=2 * stages, strategy=planner,
        options=PlanOptions(optimizer_bytes=2.0),
    )  # fmt: skip
    return {
        "planner": planner, "ops": len(graph.ops), "stages": stages,
        "parameters": sum(p.bytes for p in graph.parameters) // 4,
        "capture_s": round(captured - begin, 1), "profile_s": round(profiled - captured, 1),
        "plan_s": round(time.perf_counter() - profiled, 1),
        "plan_cpu_s": round(time.process_time() - cpu, 1), "predicted_step_s": plan.predicted_step_s,
        "recomputed_bytes": sum(s.recomputed_bytes for s in plan.stages),
        "offloaded_bytes": sum(s.offloaded_bytes for s in plan.stages),
        "fullest": max(s.memory.total / cap for s, cap in zip(plan.stages, plan.caps, strict=True)),
    }  # fmt: skip


def apart(*arguments: str) -> Any:
    """The same file in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("chains", "graphs", "growth", "llama"))
    parser.add_argument("--one", nargs="+", help="measure one thing in this process and print JSON")
    options = parser.parse_args()
    if options.one:
        kind, *rest = options.one
        measured = {
            "chains": on_chains, "graphs": on_graphs, "growth": lambda: on_growth(int(rest[0])),
            "llama": lambda: on_llama(int(rest[0]), int(rest[1]), rest[2]),
        }[kind]()  # fmt: skip
        print(json.dumps(measured))
        return 0
    parts: dict[str, Callable[[], Any]] = {
        "chains": lambda: apart("--one", "chains"),
        "graphs": lambda: apart("--one", "graphs"),
        "growth": lambda: [apart("--one", "growth", str(k)) for k in (8, 25, 83, 250, 833)],
        "llama": lambda: [apart("--one", "llama", "80", "64", name) for name in ("probe", "dawnpiper")],
    }
    target = ROOT / "results" / "planners.json"
    results = json.loads(target.read_text()) if target.exists() else {}
    results["machine"] = describe_machine()
    for name, measure in parts.items():
        if options.only in (None, name):
            results[name] = measure()
            target.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
