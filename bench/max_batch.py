"""The largest micro-batches that planners find a plan for, simulated at real sizes and run at small ones.

    python bench/max_batch.py                           both parts; about a quarter of an hour on two cores
    python bench/max_batch.py --only simulated --models bert
    python bench/max_batch.py --only run --ranks 2

simulated  BERT-large, GPT-2 1.5B, T5-3B and AmoebaNet-D (18, 256) in float32 with AdamW on 4 and 8 x
           A100-40GB, by roofline; 4 micro-batches per device and step. Updates after a flush (1f1b) or with
           stashed weights (async_1f1b). Caps: what an A100 has; and, tight and for 4 devices, 1.0 and 1.3
           times the least with which pipedream trains one row.
run        small models on gloo ranks of this machine under the ledger's cap (bench/batch_ranks.py).

Models are captured at two sizes; other sizes are interpolated, and estimated by roofline again. dawnpiper's
largest size on 4 devices is captured too, to see that its interpolation was right. Written to
bench/results/max_batch.json, each part as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from math import ceil
from pathlib import Path
from threading import Lock
from typing import Any

from batch_figures import common_size, compared, fullest, groups, reasons
from machine import describe_machine

from pipeloom.api.passes import estimate
from pipeloom.api.planning import MOST, Planning, Take
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan
from pipeloom.ir.units import format_bytes
from pipeloom.planner import find_cluster
from pipeloom.planner.batches import Sample, interpolated, largest_size

RESULTS = Path(__file__).parent / "results" / "max_batch.json"
MODELS = ("bert", "gpt2", "t5", "amoebanet")
PLANNERS = ("pipedream", "vpipe", "dawnpiper", "probe")
SCHEDULES = {"flush": "1f1b", "stash": "async_1f1b"}
DEVICES = (4, 8)
TIGHT = (1.0, 1.3)
PER_DEVICE = 4
"""Micro-batches of a step for each device."""

CAPTURED = (2, 4)
"""Rows at which models are captured. Of one row, shapes need not follow those of several."""


# --- one model ------------------------------------------------------------------------------------


def samples(first: Sample, second: Sample, cluster: Cluster) -> Take:
    """Size -> the model at it: shapes by interpolation, costs by roofline."""

    @lru_cache(maxsize=64)
    def take(size: int) -> Sample:
        return estimated(size, interpolated(first, second, size).graph, cluster)

    return take


def shapes(at: Sample) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in at.graph.value.items()}


def estimated(size: int, graph: OpGraph, cluster: Cluster) -> Sample:
    return Sample(size=size, graph=graph, profiles=estimate(graph, cluster))


def with_cap(cluster: Cluster, cap: int) -> Cluster:
    return replace(cluster, devices=tuple(replace(d, memory_bytes=cap) for d in cluster.devices))


def planning(cluster: Cluster, weights: str, planner: str) -> Planning:
    count = len(cluster.devices)
    return Planning(
        stages=count, microbatches=PER_DEVICE * count, cluster=cluster, schedule=SCHEDULES[weights],
        strategy=planner,
    )  # fmt: skip


def planned(how: Planning, take: Take, size: int) -> Plan | None:
    """The plan for micro-batches of `size` rows, None if none fits."""
    at = take(size)
    try:
        return how.plan(at.graph, at.profiles, size, explained=False)
    except InfeasibleError:
        return None


def least_cap(cluster: Cluster, weights: str, planner: str, take: Take, rows: int = 1) -> int:
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


def largest(how: Planning, take: Take, start: int) -> Plan | None:
    """The plan with the largest micro-batches, sought from `start` rows upwards; None if not one row fits."""
    found = largest_size(range(1, MOST + 1), lambda size: how.fits(take(size)), start=start - 1)
    return None if found is None else planned(how, take, found)


def cell(cluster: Cluster, weights: str, take: Take) -> dict[str, Any]:
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
        "batch": plan.microbatch_size, "samples_per_s": samples_per_s(plan),
        "at": {str(plan.microbatch_size): samples_per_s(plan)}, "fullest": fullest(plan),
        "recomputed_bytes": sum(stage.recomputed_bytes for stage in plan.stages),
        "offloaded_bytes": sum(stage.offloaded_bytes for stage in plan.stages),
        "turns_s": [round(stage.turn_s, 6) for stage in plan.stages],
        **{key: float(value) for key, value in plan.notes.items()},
    }  # fmt: skip


def _add_speeds(made: dict[str, Any], cluster: Cluster, weights: str, take: Take) -> None:
    """Speeds at the sizes at which planners are compared. A smaller size than the largest may have no plan,
    as searches are not exact; its speed is then 0, and it is in no ratio."""
    rows = made["planners"]
    for names in (PLANNERS, ("dawnpiper", "vpipe"), ("probe", "dawnpiper")):
        size = common_size(made, names)
        for planner in names if size else ():
            if str(size) not in rows[planner]["at"]:
                plan = planned(planning(cluster, weights, planner), take, size)
                rows[planner]["at"][str(size)] = samples_per_s(plan) if plan else 0.0


def cells(model: str, take: Take, devices: list[int]) -> Iterator[dict[str, Any]]:
    """Under tight caps on 4 devices only, which is enough to tell."""
    for count in devices:
        cluster = find_cluster(f"{count} x a100-40")
        for weights in SCHEDULES:
            caps = {"A100-40GB": cluster.devices[0].memory_bytes}
            if count == DEVICES[0]:
                least = least_cap(cluster, weights, "pipedream", take)
                caps |= {f"x{factor}": ceil(factor * least) for factor in TIGHT}
            for cap, size in caps.items():
                name = f"{model}, {count} devices, {weights}, {cap} ({format_bytes(size)})"
                known = {"name": name, "model": model, "devices": count, "cap": cap}
                yield known | cell(with_cap(cluster, size), weights, take)


def on_model(key: str, devices: list[int]) -> Iterator[dict[str, Any]]:
    """Everything simulated of one model, in this process: what it is, its cells, and the check at last."""
    from models import REAL

    from pipeloom import capture

    begin, job = time.process_time(), REAL[key].job
    cluster = find_cluster(f"{devices[0]} x a100-40")
    first, second = (Sample(size=n, graph=capture(job, n).graph, profiles={}) for n in CAPTURED)
    yield {
        "ops": len(first.graph.ops), "parameters": sum(p.bytes for p in first.graph.parameters) // 4,
        "length": REAL[key].length, "capture_cpu_s": round(time.process_time() - begin, 1),
    }  # fmt: skip
    take = samples(first, second, cluster)
    size = 0
    for made in cells(REAL[key].name, take, devices):
        size = size or made["planners"]["dawnpiper"]["batch"]
        yield {"cells": [made]}
    if size:
        again = estimated(size, capture(job, size).graph, cluster)
        plan = planned(planning(cluster, "flush", "dawnpiper"), lambda _: again, size)
        checked = {
            "rows": size, "has_a_plan": plan is not None,
            "shapes_as_interpolated": shapes(again) == shapes(take(size)),
            "samples_per_s": samples_per_s(plan) if plan else 0.0,
        }  # fmt: skip
        yield {"captured_again": checked, "cpu_s": round(time.process_time() - begin, 1)}


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


def apart(
    model: str, devices: list[int], before: list[dict[str, Any]], keep: Callable[[str, Any], None]
) -> None:
    """One model in a process of its own; what it has found is kept line by line, beside cells found before
    for other numbers of devices."""
    call = [sys.executable, __file__, "--one", model, "--devices", *map(str, devices)]
    found: dict[str, Any] = {"cells": [made for made in before if made["devices"] not in devices]}
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            part = json.loads(line)
            found |= part | {"cells": found["cells"] + part.get("cells", [])}
            keep(model, found)
            for made in part.get("cells", []):
                print(row_of(made), flush=True)
    if process.returncode:
        raise SystemExit(f"simulating {model} ended with status {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("simulated", "run"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), help="simulated ones")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--jobs", type=int, default=2, help="models simulated at the same time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", choices=MODELS, help="simulate one model in this process and print JSON")
    options = parser.parse_args()
    if options.one:
        for part in on_model(options.one, options.devices):
            print(json.dumps(part), flush=True)
        return 0
    guard, target = Lock(), options.output

    def change(part: str, made: dict[str, Any]) -> dict[str, Any]:
        """What is written, with these entries of a part."""
        with guard:
            results: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
            results["machine"] = describe_machine()
            results[part] = results.get(part, {}) | made
            target.write_text(json.dumps(results, indent=1) + "\n")
        return results

    passed = True
    if options.only in (None, "simulated"):
        known = change("simulated", {})["simulated"]

        def one(model: str) -> None:
            before = known.get(model, {}).get("cells", [])
            apart(model, options.devices, before, lambda name, made: change("simulated", {name: made}))

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, options.models))
        known = change("simulated", {})["simulated"]
        found = [made for model in known.values() for made in model["cells"]]
        change("compared", {name: compared(group) for name, group in groups(found).items()})
        change("reasons", {"said": reasons(found)})
        print_comparison(found)
    if options.only in (None, "run"):
        from batch_ranks import run_models

        passed = run_models(options.models, options.ranks, lambda name, found: change("run", {name: found}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
