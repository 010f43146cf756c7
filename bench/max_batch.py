"""The largest micro-batches that planners find a plan for, simulated at real sizes and run at small ones.

    python bench/max_batch.py                           both parts; some hours on two cores
    python bench/max_batch.py --only simulated --minutes 50
    python bench/max_batch.py --only run --ranks 2 4

simulated  BERT-large, GPT-2 1.5B, T5-3B and AmoebaNet-D (18, 256) in float32 with AdamW on 4 and 8 x
           A100-40GB, by roofline; 4 micro-batches per device and step. Updates after a flush (1f1b) or with
           stashed weights (async_1f1b). Caps: what an A100 has; and, tight and for 4 devices, 1.0 and 1.3
           times the least with which pipedream trains one row.
run        small models on gloo ranks of this machine under the ledger's cap (bench/batch_ranks.py).

Models are captured at two sizes; other sizes are interpolated, and estimated by roofline again. dawnpiper's
largest size on 4 devices is captured too, to see that its interpolation was right. Written to
bench/results/max_batch.json, each cell as soon as it is there, the caps that an A100 has first. A call goes
on with the cells that are missing; those that another version of the planners' code has made are dropped.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from math import ceil, inf
from pathlib import Path
from threading import Lock
from typing import Any

from batch_figures import common_size, compared, fullest, groups, reasons
from batch_record import DEVICES, FULL, SCHEDULES, Record, code, keys

from pipeloom.api import LARGEST_MICROBATCH, ModelAt, PlanRequest, estimate
from pipeloom.clusters import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan
from pipeloom.ir.units import format_bytes
from pipeloom.planner import ProfiledModel, interpolate_sample, largest_size

RESULTS = Path(__file__).parent / "results" / "max_batch.json"
MODELS = ("bert", "gpt2", "t5", "amoebanet")
NAMES = {
    "bert": "BERT-large",
    "gpt2": "GPT-2 1.5B",
    "t5": "T5-3B",
    "amoebanet": "AmoebaNet-D (18, 256)",
}
"""As in models.py, which imports PyTorch."""

PLANNERS = ("pipedream", "vpipe", "dawnpiper", "probe")
PER_DEVICE = 4
"""Micro-batches of a step for each device."""

CAPTURED = (2, 4)
"""Rows at which models are captured. Of one row, shapes need not follow those of several."""


# --- one model ------------------------------------------------------------------------------------


def samples(first: ProfiledModel, second: ProfiledModel, cluster: Cluster) -> ModelAt:
    """Size -> the model at it: shapes by interpolation, costs by roofline."""

    @lru_cache(maxsize=64)
    def take(size: int) -> ProfiledModel:
        return estimated(size, interpolate_sample(first, second, size).graph, cluster)

    return take


def shapes(at: ProfiledModel) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in at.graph.value.items()}


def estimated(size: int, graph: OpGraph, cluster: Cluster) -> ProfiledModel:
    return ProfiledModel(size=size, graph=graph, profiles=estimate(graph, cluster))


def with_cap(cluster: Cluster, cap: int) -> Cluster:
    return replace(cluster, devices=tuple(replace(d, memory_bytes=cap) for d in cluster.devices))


def planning(cluster: Cluster, weights: str, planner: str) -> PlanRequest:
    count = len(cluster.devices)
    return PlanRequest(
        stages=count,
        microbatches=PER_DEVICE * count,
        cluster=cluster,
        schedule=SCHEDULES[weights],
        strategy=planner,
    )


def planned(how: PlanRequest, take: ModelAt, size: int) -> Plan | None:
    """The plan for micro-batches of `size` rows, None if none fits."""
    try:
        return how.plan(take(size), explained=False)
    except InfeasibleError:
        return None


def least_cap(cluster: Cluster, weights: str, planner: str, take: ModelAt, rows: int = 1) -> int:
    """The smallest cap, to a thousandth, with which a planner that only looks at caps afterwards has a plan
    for micro-batches of `rows` rows."""
    free = planned(planning(with_cap(cluster, 1 << 50), weights, planner), take, rows)
    assert free is not None, "under a cap of a pebibyte everything fits"
    cap = max(stage.memory.total for stage in free.stages)
    while planned(planning(with_cap(cluster, cap), weights, planner), take, rows) is None:
        cap = ceil(cap * 1.001)
    return cap


def samples_per_s(plan: Plan) -> float:
    return plan.microbatches * plan.microbatch_size / plan.predicted_step_s


def largest(how: PlanRequest, take: ModelAt, start: int) -> Plan | None:
    """The plan with the largest micro-batches, sought from `start` rows upwards; None if not one row fits."""
    found = largest_size(range(1, LARGEST_MICROBATCH + 1), lambda size: how.fits(take(size)), start=start - 1)
    return None if found is None else planned(how, take, found)


def cell(cluster: Cluster, weights: str, take: ModelAt) -> dict[str, Any]:
    """Every planner's largest micro-batch, and its speed at that size and at those of the others."""
    rows: dict[str, dict[str, Any]] = {}
    start = 1
    for planner in PLANNERS:
        begin = time.process_time()
        plan = largest(planning(cluster, weights, planner), take, start)
        rows[planner] = {"batch": 0, "at": {}} if plan is None else described(plan)
        rows[planner]["cpu_s"] = round(time.process_time() - begin, 1)
        start = max(1, rows[planner]["batch"])
    made = {"weights": weights, "cap_bytes": cluster.devices[0].memory_bytes, "planners": rows}
    _add_speeds(made, cluster, weights, take)
    return made


def described(plan: Plan) -> dict[str, Any]:
    """A plan's row in a cell. steady_step_s: without a flush, of a pipeline that stays full."""
    return {
        "batch": plan.microbatch_size,
        "samples_per_s": samples_per_s(plan),
        "at": {str(plan.microbatch_size): samples_per_s(plan)},
        "fullest": fullest(plan),
        "recomputed_bytes": sum(stage.recomputed_bytes for stage in plan.stages),
        "offloaded_bytes": sum(stage.offloaded_bytes for stage in plan.stages),
        "turns_s": [round(stage.turn_s, 6) for stage in plan.stages],
        **{key: float(value) for key, value in plan.notes.items()},
    }


def _add_speeds(made: dict[str, Any], cluster: Cluster, weights: str, take: ModelAt) -> None:
    """Speeds at the sizes at which planners are compared. A smaller size than the largest may have no plan,
    as searches are not exact; its speed is then 0, and it is in no ratio."""
    rows = made["planners"]
    for names in (PLANNERS, ("dawnpiper", "vpipe"), ("probe", "dawnpiper")):
        size = common_size(made, names)
        for planner in names if size else ():
            if str(size) not in rows[planner]["at"]:
                plan = planned(planning(cluster, weights, planner), take, size)
                rows[planner]["at"][str(size)] = samples_per_s(plan) if plan else 0.0


def one_cell(model: str, count: int, weights: str, cap: str, samples_at: Path) -> dict[str, Any]:
    """A cell, in this process."""
    cluster = find_cluster(f"{count} x a100-40")
    take = samples(*pickle.loads(samples_at.read_bytes()), cluster)
    size = cluster.devices[0].memory_bytes
    if cap != FULL:
        size = ceil(float(cap.removeprefix("x")) * least_cap(cluster, weights, "pipedream", take))
    named = f"{NAMES[model]}, {count} devices, {weights}, {cap} ({format_bytes(size)})"
    known = {"name": named, "model": NAMES[model], "devices": count, "cap": cap, "code": code()}
    return known | cell(with_cap(cluster, size), weights, take)


def captured(model: str, samples_at: Path) -> dict[str, Any]:
    """Capture a model at two sizes, for the cells. Returns what it is."""
    from models import REAL

    from pipeloom import capture

    begin, job = time.process_time(), REAL[model].job
    found = [ProfiledModel(size=n, graph=capture(job, n).graph, profiles={}) for n in CAPTURED]
    samples_at.write_bytes(pickle.dumps(found))
    return {
        "ops": len(found[0].graph.ops),
        "parameters": sum(p.bytes for p in found[0].graph.parameters) // 4,
        "length": REAL[model].length,
        "capture_cpu_s": round(time.process_time() - begin, 1),
    }


def checked(model: str, size: int, samples_at: Path) -> dict[str, Any]:
    """The model captured at the size that dawnpiper has found by interpolation."""
    from models import REAL

    from pipeloom import capture

    cluster = find_cluster(f"{DEVICES[0]} x a100-40")
    take = samples(*pickle.loads(samples_at.read_bytes()), cluster)
    again = estimated(size, capture(REAL[model].job, size).graph, cluster)
    plan = planned(planning(cluster, "flush", "dawnpiper"), lambda _: again, size)
    return {
        "captured_again": {
            "rows": size,
            "has_a_plan": plan is not None,
            "code": code(),
            "shapes_as_interpolated": shapes(again) == shapes(take(size)),
            "samples_per_s": samples_per_s(plan) if plan else 0.0,
        }
    }


# --- printing -------------------------------------------------------------------------------------


def row_of(made: dict[str, Any]) -> str:
    """One line: the cell, and per planner its largest size and speed."""
    parts = []
    for planner, row in made["planners"].items():
        if not row["batch"]:
            parts.append(f"{planner} none")
            continue
        common = common_size(made, PLANNERS)
        at = f", {row['at'][str(common)]:.3g}/s at {common}" if common else ""
        parts.append(f"{planner} {row['batch']} ({row['samples_per_s']:.3g}/s{at})")
    return f"{made['name']}: {'; '.join(parts)}"


def print_comparison(found: list[dict[str, Any]]) -> None:
    for name, group in groups(found).items():
        print(f"\n{name}: {len(group)} cells")
        for ratio, row in compared(group).items():
            claim = f", the paper up to {row['paper_up_to']:g}" if row["paper_up_to"] else ""
            print(
                f"  {ratio:<46} best {row['best']:.2f}, geometric mean {row['mean']:.2f}, least "
                f"{row['worst']:.2f}{claim}"
            )
    print()
    for sentence in reasons(found):
        print(sentence)


# --- main -----------------------------------------------------------------------------------------


def apart(*arguments: str) -> dict[str, Any]:
    """One thing in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def simulate_all(record: Record, models: list[str], devices: list[int], jobs: int, minutes: float) -> None:
    """All cells that are missing, some at a time; none begins after so many minutes."""
    record.drop_old()
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        guards = {model: Lock() for model in models}

        def known(model: str) -> dict[str, Any]:
            return dict(record.read().get("simulated", {}).get(model, {"cells": []}))

        def samples_of(model: str) -> Path:
            target = Path(folder) / model
            with guards[model]:
                if not target.exists():
                    record.simulated(model, apart("capture", model, str(target)))
            return target

        def one(key: tuple[int, str, str], model: str) -> None:
            there = [(made["devices"], made["weights"], made["cap"]) for made in known(model)["cells"]]
            if key not in there and time.monotonic() < until:
                made = apart("cell", model, *map(str, key), str(samples_of(model)))
                record.simulated(model, {"cells": [made]})
                print(row_of(made), flush=True)

        def check(model: str) -> None:
            row = known(model)
            first = next((m for m in row["cells"] if (m["devices"], m["weights"]) == (4, "flush")), None)
            size = first["planners"]["dawnpiper"]["batch"] if first else 0
            if size and "captured_again" not in row and time.monotonic() < until:
                record.simulated(model, apart("check", model, str(size), str(samples_of(model))))

        with ThreadPoolExecutor(jobs) as pool:
            begun = [pool.submit(one, key, model) for key in keys(devices) for model in models]
            begun += [pool.submit(check, model) for model in models]
            for each in begun:
                each.result()


def in_this_process(kind: str, model: str, *rest: str) -> dict[str, Any]:
    """What `apart` asks for."""
    if kind == "cell":
        count, weights, cap, at = rest
        return one_cell(model, int(count), weights, cap, Path(at))
    if kind == "check":
        return checked(model, int(rest[0]), Path(rest[1]))
    return captured(model, Path(rest[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("simulated", "run"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), help="simulated ones")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--jobs", type=int, default=2, help="cells simulated at the same time")
    parser.add_argument("--minutes", type=float, default=inf, help="begin no cell after that time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs="+", help="do one thing in this process and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(in_this_process(*options.one)), flush=True)
        return 0
    record, passed = Record(options.output), True
    if options.only in (None, "simulated"):
        simulate_all(record, options.models, options.devices, options.jobs, options.minutes)
        known = record.read().get("simulated", {})
        found = [made for model in known.values() for made in model["cells"]]
        print_comparison(found)
    if options.only in (None, "run"):
        from batch_ranks import run_models

        def keep(name: str, made: Any) -> None:
            record.change("run", {name: made})

        passed = run_models(options.models, options.ranks, keep)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
