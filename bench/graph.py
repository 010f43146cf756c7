"""Stages as a DAG against stages as a chain. Writes bench/results/graph.json.

    python bench/graph.py                    everything, 10 minutes
    python bench/graph.py --only models      one part: models, memory, case, order, random, brute,
                                             huge

models  MMT, DLRM and CANDLE-Uno of published size (branching.py) on 4, 8, 16 and 32 V100s of 16 GB, by
        roofline: `graphpipe`, the best chain (`--no-branches`), and that chain as a sequential pipeline, in
        which every stage also waits for the one before it (the paper's baseline, and what systems do that
        hand values on from stage to stage); each with the micro-batch size of its fastest step, and all at
        the sequential one's size, which shows what parallel stages alone gain. Rows per step grow with the
        devices, as in the paper, whose numbers of rows are lost but for MMT on 8 (128 rows).
memory  The same where devices hold just what the DAG needs at some micro-batch size: deeper pipelines then
        have smaller micro-batches. Each with the size of its fastest step.
case    The paper's case study on 8 V100s: depth and step of the three.
order   MMT whose towers run in turn against MMT whose towers run one after another.
random  Random graphs (chains, series-parallel, others) under caps of 1.0 to 1.3 times the least: the step
        against that of `exact` and of the best chain; 200, or as many as `--minutes` allow.
brute   Random series-parallel graphs of 5 to 8 ops in 2 to 4 stages against every convex partition: 500, or
        as many as `--minutes` allow.
huge    Four towers of 9,984 ops on 8 and 32 devices, every residual kept: processor seconds, and the
        bottleneck against perfect division and `exact`.

Everything is simulated. The paper measured on Summit: up to 1.6 times the throughput of the best chain,
parallel stages alone 1.12 to 1.40 times on 32 devices; case study depth 4 against 8, 1.2 times.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import branching
from layered import layered_towers
from machine import describe_machine

ROOT = Path(__file__).parent
sys.path.append(str(ROOT.parent / "tests" / "support"))

from branching_graphs import KINDS, best_of_all, random_graph, request_for, step_s  # noqa: E402

from pipeloom import api  # noqa: E402
from pipeloom.clusters import find_cluster  # noqa: E402
from pipeloom.ir.cluster import Cluster  # noqa: E402
from pipeloom.ir.errors import InfeasibleError  # noqa: E402
from pipeloom.ir.graph import Value  # noqa: E402
from pipeloom.ir.plan import Plan  # noqa: E402
from pipeloom.ir.stages import Crossing  # noqa: E402
from pipeloom.lowering import lower  # noqa: E402
from pipeloom.planner import (  # noqa: E402
    PlanCosts,
    PlanOptions,
    ProfiledModel,
    interpolate_sample,
    make_plan,
)
from pipeloom.profiler import roofline  # noqa: E402
from pipeloom.simulator import simulate  # noqa: E402

RESULTS = ROOT / "results" / "graph.json"
DEVICES = (4, 8, 16, 32)
ROWS_PER_DEVICE = {"mmt": 16, "dlrm": 128, "candle": 512}
SAMPLES = {"mmt": (2, 4), "dlrm": (8, 16), "candle": (16, 32)}
"""Rows at which a model is captured; between and beyond these it is interpolated."""
BOUND = (("mmt", 8), ("mmt", 32), ("candle", 8), ("dlrm", 8))
COUNTS = (1, 2, 4, 8, 16)
"""Micro-batches per device and step that are tried where memory binds."""


def cluster_of(devices: int) -> str:
    """Summit's nodes have 4 V100s that the paper used."""
    return f"{devices // 4} nodes of 4 x v100-16" if devices > 4 else f"{devices} x v100-16"


def models_at(name: str) -> Callable[[int, int], ProfiledModel]:
    """(rows, devices) -> the model of published size."""
    first, second = (api.capture(branching.PUBLISHED[name](), rows).graph for rows in SAMPLES[name])

    def at(rows: int, devices: int) -> ProfiledModel:
        device = find_cluster(cluster_of(devices))
        ends = [
            ProfiledModel(size=size, graph=graph, profiles=api.estimate(graph, device))
            for size, graph in zip(SAMPLES[name], (first, second), strict=True)
        ]
        return interpolate_sample(ends[0], ends[1], rows)

    return at


def request(
    devices: int, rows: int, *, branches: bool = True, memory_bytes: int | None = None
) -> api.PlanRequest:
    """For `graphpipe`, every residual kept. memory_bytes: of each device, if not the 16 GB of a V100."""
    cluster = find_cluster(cluster_of(devices))
    if memory_bytes is not None:
        capped = (replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
        cluster = replace(cluster, devices=tuple(capped))
    return api.PlanRequest(
        stages=devices,
        microbatches=1,
        cluster=cluster,
        strategy="graphpipe",
        global_batch=rows,
        options=PlanOptions(branches=branches, treatments=()),
    )


def sequential_s(plan: Plan, model: ProfiledModel, cluster: Cluster) -> float:
    """Seconds of the simulated step if every stage also waits for the one in front of it, and for the
    gradient of the one behind it."""
    stages = plan.stage_graph(model.graph)
    behind = [(s, s + 1) for s in range(len(stages.stages) - 1) if not stages.gradients(s, s + 1)]
    word = {"shape": (1,), "dtype": "float32", "needs_grad": True}
    added = (Crossing(value=Value(name=f"behind {a}", **word), source=a, target=b) for a, b in behind)
    in_a_row = replace(stages, crossings=(*stages.crossings, *added))
    costs = PlanCosts(model.graph, model.profiles, cluster).stages(plan)
    program = lower(plan.as_schedule, in_a_row, policy=plan.memory)
    return simulate(program, in_a_row, costs, cluster).step_s


def figures(plan: Plan, rows: int) -> dict[str, Any]:
    """What is printed and kept of a plan."""
    depth = plan.notes.get("branches.depth", str(len(plan.stages)))
    return {
        "rows_per_s": rows / plan.predicted_step_s,
        "step_s": plan.predicted_step_s,
        "microbatch_size": plan.microbatch_size,
        "peak_bytes": max(plan.peaks),
        "depth": int(depth),
    }


def plan_at(how: api.PlanRequest, model: ProfiledModel) -> Plan | None:
    try:
        return how.plan(model, explained=False)
    except InfeasibleError:
        return None


Figures: TypeAlias = dict[str, dict[str, Any]]
"""Kind of pipeline (`KINDS_OF_PIPELINE`) -> its figures; one that does not fit is missing."""

KINDS_OF_PIPELINE = ("graphpipe", "chain", "sequential")


def figures_at(devices: int, rows: int, model: ProfiledModel, memory_bytes: int | None = None) -> Figures:
    """The plans of one micro-batch size."""
    how = request(devices, rows, memory_bytes=memory_bytes)
    found: Figures = {}
    if (dag := plan_at(how, model)) is None:
        return found
    found["graphpipe"] = figures(dag, rows)
    if (chain := plan_at(request(devices, rows, branches=False, memory_bytes=memory_bytes), model)) is None:
        return found
    found["chain"] = figures(chain, rows)
    step_s = sequential_s(chain, model, how.cluster)
    found["sequential"] = {**found["chain"], "step_s": step_s, "rows_per_s": rows / step_s}
    return found


def best_sizes(tried: Sequence[Figures]) -> dict[str, Any]:
    """Each kind with the micro-batch size of its fastest step, and how much faster the DAG is than others.

    tried: of several sizes.
    """
    row: dict[str, Any] = {
        kind: min((each[kind] for each in tried if kind in each), key=lambda figure: figure["step_s"])
        for kind in KINDS_OF_PIPELINE
        if any(kind in each for each in tried)
    }
    if "sequential" in row:
        alike = next(each for each in tried if each.get("sequential") == row["sequential"])
        row["gain"] = row["sequential"]["step_s"] / row["graphpipe"]["step_s"]
        row["gain_at_equal_size"] = alike["sequential"]["step_s"] / alike["graphpipe"]["step_s"]
        row["gain_over_chain"] = row["chain"]["step_s"] / row["graphpipe"]["step_s"]
    return row


def models(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each model and number of devices what a DAG of stages gains, after each of them.

    found: what is known already, and stays.
    """
    for name in ROWS_PER_DEVICE:
        left = [devices for devices in DEVICES if f"{name} {devices}" not in found]
        at = models_at(name) if left else None
        for devices in left:
            assert at is not None, "something is left"
            rows = ROWS_PER_DEVICE[name] * devices
            sizes = [rows // count for count in (devices, 2 * devices, 4 * devices) if rows // count]
            begin = time.process_time()
            tried = [figures_at(devices, rows, at(size, devices)) for size in sizes]
            row = best_sizes(tried)
            if not row:
                print(f"{name} on {devices}: nothing fits", flush=True)
                continue
            row |= {"rows": rows, "processor_s": time.process_time() - begin}
            found[f"{name} {devices}"] = row
            print(f"{name} on {devices}:", json.dumps(row), flush=True)
            yield found


def under_caps(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a DAG gains where memory binds, after each model, number of devices and cap.

    Caps are what the DAG's plan of some micro-batch size needs, so that it has that size, and deeper
    pipelines smaller ones. found: what is known already, and stays.
    """
    for name, devices in BOUND:
        if (key := f"{name} {devices}") in found:
            continue
        rows = ROWS_PER_DEVICE[name] * devices
        at, sizes = models_at(name), [ROWS_PER_DEVICE[name] // count for count in COUNTS]
        free = {size: figures_at(devices, rows, at(size, devices)) for size in sizes}
        row: dict[str, Any] = {
            "rows": rows,
            "seconds_per_row": {size: seconds_of(at(size, devices)) / size for size in sizes},
            "free": {size: {kind: of["step_s"] for kind, of in each.items()} for size, each in free.items()},
        }
        for size, each in free.items():
            if "graphpipe" not in each:
                continue
            cap = each["graphpipe"]["peak_bytes"]
            tried = [figures_at(devices, rows, at(other, devices), cap) for other in sizes]
            row[f"cap of {size}"] = {"cap_bytes": cap, **best_sizes(tried)}
            print(f"{key} within {cap / 2**30:.2f} GiB:", json.dumps(row[f"cap of {size}"]), flush=True)
        found[key] = row
        yield found


def seconds_of(model: ProfiledModel) -> float:
    """Seconds of all ops, forward and backward, on one device."""
    (profile,) = model.profiles.values()
    return sum(cost.forward_s + cost.backward_s for cost in profile.costs.values())


def case() -> dict[str, Any]:
    """The case study: two branches, joined, on 8 devices."""
    model = branching.PUBLISHED["case_study"]()
    graph = api.capture(model, 4).graph
    cluster = find_cluster(cluster_of(8))
    found = figures_at(8, 128, ProfiledModel(size=4, graph=graph, profiles=api.estimate(graph, cluster)))
    print("case study:", json.dumps(found), flush=True)
    return found


def order() -> dict[str, float]:
    """Seconds of a step of MMT on 8 devices, its towers one after another and in turn."""
    steps = {}
    for name in ("mmt", "mmt_in_turn"):
        graph = api.capture(branching.PUBLISHED[name](), 4).graph
        how = request(8, 128)
        plan = how.plan(ProfiledModel(size=4, graph=graph, profiles=api.estimate(graph, how.cluster)))
        steps[name] = plan.predicted_step_s
    print("order:", steps, flush=True)
    return steps


def at_random(minutes: float, count: int = 200) -> dict[str, Any]:
    """Whether `graphpipe` is ever slower than the others."""
    end = time.monotonic() + 60 * minutes
    slower, faster, planned, tried = [], 0, 0, 0
    for seed in range(count):
        if time.monotonic() > end:
            break
        tried += 1
        dice = random.Random(seed)
        graph, profile = random_graph(seed, dice.randint(6, 40), KINDS[seed % 3])
        how = request_for(graph, profile, dice.randint(2, 6), slack=dice.uniform(1, 1.3))
        dag = step_s(how)
        other = min(step_s(how, "exact"), step_s(how, branches=False))
        planned += dag < float("inf")
        faster += dag < other * (1 - 1e-6)
        if dag > other * (1 + 1e-6):
            slower.append(seed)
    row = {"graphs": tried, "planned": planned, "faster": faster, "slower": slower}
    print("random:", json.dumps(row), flush=True)
    return row


def brute(minutes: float, count: int = 500) -> dict[str, Any]:
    """Plans against the best of all convex partitions."""
    end = time.monotonic() + 60 * minutes
    ratios, none, tried = [], 0, 0
    for seed in range(count):
        if time.monotonic() > end:
            break
        dice = random.Random(seed + 10**6)
        ops, stages = dice.randint(5, 8), dice.randint(2, 4)
        graph, profile = random_graph(seed, ops, "series-parallel")
        how = request_for(graph, profile, stages, slack=dice.choice([None, 1.0, 1.1, 1.3]))
        planned = step_s(how)
        least = best_of_all(how, stages, below=planned)
        tried += 1
        if least < float("inf") and planned == float("inf"):
            none += 1
        elif least < float("inf"):
            ratios.append(planned / least)
    missed = sorted((ratio for ratio in ratios if ratio > 1 + 1e-9), reverse=True)
    row = {
        "graphs": tried,
        "with_a_plan": len(ratios) + none,
        "optimal": len(ratios) - len(missed),
        "share": (len(ratios) - len(missed)) / max(1, len(ratios) + none),
        "no_plan_found": none,
        "worst_ratio": max(ratios, default=1.0),
        "misses": [round(ratio, 4) for ratio in missed],
    }
    print("brute:", json.dumps(row), flush=True)
    return row


def huge() -> dict[str, Any]:
    """Seconds to plan a graph of 10,000 ops."""
    graph = layered_towers(4, 208)
    found = {}
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
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("models", "memory", "case", "order", "random", "brute", "huge")
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    parser.add_argument("--again", action="store_true", help="measure also the models that the results have")
    parser.add_argument("--minutes", type=float, default=4, help="most, for `brute`, and for `random`")
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "case": case,
        "order": order,
        "random": lambda: at_random(options.minutes),
        "brute": lambda: brute(options.minutes),
        "huge": huge,
    }
    for part in options.only:
        if part in ("models", "memory"):
            measure = models if part == "models" else under_caps
            for rows in measure({} if options.again else known.get(part, {})):
                known[part] = {**rows, "machine": describe_machine()}
                RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        else:
            known[part] = {"machine": describe_machine(), **run[part]()}
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
