"""The largest micro-batches that planners find a plan for, simulated at real sizes and run at small ones.

    python bench/max_batch.py --only simulated --models bert --minutes 9
    python bench/max_batch.py --only run --ranks 2 4

simulated  BERT-large, GPT-2 1.5B, T5-3B and AmoebaNet-D (18, 256) in float32 with AdamW on 4 and 8 x
           A100-40GB, by roofline; 4 micro-batches per device and step. Updates after a flush (1f1b) or with
           stashed weights (async_1f1b). Caps: what an A100 has; and, tight and for 4 devices, 1.0 and 1.3
           times the least with which pipedream trains one row.
run        small models on gloo ranks of this machine, under the ledger's cap. For each planner: the plan with
           the largest micro-batches that fit runs some steps, with every rank's peak under its cap; one row
           more is refused by the planner, and the ledger stops the run when a batch has it. Where the same
           cut carries it all the same (a planner that does not look at memory may cut worse for more rows),
           the plan that the planner makes for it without a cap is run, and is to be stopped. A plan made
           without a cap, with everything kept, is refused by the forecast of the ranks before they train;
           so are plans with stashed weights.

Models are captured at two sizes; other sizes are interpolated, and estimated by roofline again. dawnpiper's
largest size on 4 devices is captured too, to see that its interpolation was right. All models and caps take
some hours on two cores: choose with --models and --devices; no cell is begun after --minutes, and the
caps that an A100 has come first.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import ceil, exp, log
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch
from machine import print_stamp, print_table

from pipeloom import Pipeline
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import InfeasibleError, MemoryCapError, ScheduleError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan, load_plan
from pipeloom.ir.text import format_bytes
from pipeloom.plan_request import LARGEST_MICROBATCH, PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel, interpolate_sample, largest_size
from pipeloom.planner.registry import PLANNERS as PLANNERS_BY_NAME
from pipeloom.planner.request import PlanOptions
from pipeloom.planning import ModelAt, captured_model, estimate, largest_plan
from pipeloom.runnable import require_runnable_plan
from pipeloom.runtime.launch.launch import launch

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


# --- arithmetic: what cells say of planners against each other ------------------------------------
# A cell is one model on one cluster under one cap with one way of updating weights; it has a row per planner:
# {"batch": largest micro-batch, 0 if none fits, "samples_per_s": at it, "at": {size: samples per second}}

Cell: TypeAlias = Mapping[str, Any]
Ratio: TypeAlias = Callable[[Cell], float | None]
"""None where a planner that is compared has no plan."""

PAPER = {
    "batch, dawnpiper / vpipe": 4.0,
    "batch, dawnpiper / pipedream": 11.0,
    "speed, dawnpiper / vpipe": 1.5,
}
"""The largest that DawnPiper's abstract claims (arXiv 2505.05856); of averages it says nothing."""


def geometric_mean(ratios: Sequence[float]) -> float:
    """
    >>> geometric_mean([2.0, 8.0])
    4.0
    """
    return round(exp(sum(map(log, ratios)) / len(ratios)), 12)


def batch_ratio(ours: str, theirs: str) -> Ratio:
    """How many times larger one planner's largest micro-batch is than another's."""

    def ratio(cell: Cell) -> float | None:
        first, second = (cell["planners"][name]["batch"] for name in (ours, theirs))
        return first / second if first and second else None

    return ratio


def speed_ratio(ours: str, theirs: str, *, everyone: bool = False) -> Ratio:
    """How many times faster a planner's plan is than another's at the largest size that both have a plan
    for, or that every planner has one for."""

    def ratio(cell: Cell) -> float | None:
        size = common_size(cell, cell["planners"] if everyone else (ours, theirs))
        if not size:
            return None
        first, second = (cell["planners"][name]["at"][str(size)] for name in (ours, theirs))
        return float(first / second) if first and second else None

    return ratio


def common_size(cell: Cell, planners: Iterable[str]) -> int:
    """The largest micro-batch that all of these planners have a plan for; 0 if one has none."""
    return min(int(cell["planners"][name]["batch"]) for name in planners)


RATIOS: dict[str, Ratio] = {
    "batch, dawnpiper / vpipe": batch_ratio("dawnpiper", "vpipe"),
    "batch, dawnpiper / pipedream": batch_ratio("dawnpiper", "pipedream"),
    "batch, probe / dawnpiper": batch_ratio("probe", "dawnpiper"),
    "speed, dawnpiper / vpipe": speed_ratio("dawnpiper", "vpipe"),
    "speed, dawnpiper / vpipe, at everyone's size": speed_ratio("dawnpiper", "vpipe", everyone=True),
    "speed, probe / dawnpiper": speed_ratio("probe", "dawnpiper"),
}


def compared(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Of each ratio: the best and the worst cell, the geometric mean, and how many cells count; beside
    what the paper claims."""
    table = {}
    for name, ratio in RATIOS.items():
        found = [(value, cell["name"]) for cell in cells if (value := ratio(cell)) is not None]
        if found:
            best, worst = max(found), min(found)
            table[name] = {
                "best": round(best[0], 3),
                "best_in": best[1],
                "mean": round(geometric_mean([value for value, _ in found]), 3),
                "worst": round(worst[0], 3),
                "worst_in": worst[1],
                "cells": len(found),
                "paper_up_to": PAPER.get(name),
            }
    return table


def groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """All cells, and those of each way of updating weights and of each cap."""
    named: dict[str, list[Cell]] = {"all": list(cells)}
    for cell in cells:
        for key in (f"weights {cell['weights']}", f"cap {cell['cap']}", f"model {cell['model']}"):
            named.setdefault(key, []).append(cell)
    return named


def reasons(cells: Sequence[Cell]) -> list[str]:
    """Why the ratios are what they are: what fills the fullest stages at the largest sizes."""
    said = []
    for planner in ("pipedream", "vpipe", "dawnpiper"):
        rows = [row for cell in cells if (row := cell["planners"][planner])["batch"]]
        if not rows:
            continue
        first = sum(row["fullest"]["stage"] == 0 for row in rows)
        last = sum(row["fullest"]["stage"] == row["fullest"]["stages"] - 1 for row in rows)
        shares = ", ".join(
            f"{kind} {sum(row['fullest'][kind] for row in rows) / len(rows):.0%}" for kind in KINDS
        )
        said.append(
            f"{planner}: the fullest stage is the first in {first} of {len(rows)} plans and the last in "
            f"{last}; on average it holds {shares}"
        )
    said += _most_freed(cells)
    best = compared(cells)
    for name in ("batch, dawnpiper / vpipe", "batch, dawnpiper / pipedream"):
        if name in best:
            said.append(
                f"{name}: largest in {best[name]['best_in']} (x{best[name]['best']:.2f}), smallest in "
                f"{best[name]['worst_in']} (x{best[name]['worst']:.2f})"
            )
    alone = [c["name"] for c in cells if c["planners"]["dawnpiper"]["batch"]]
    for other in ("pipedream", "vpipe"):
        without = [name for c in cells if (name := c["name"]) in alone and not c["planners"][other]["batch"]]
        if without:
            said.append(f"dawnpiper has a plan where {other} has none, in no ratio: {'; '.join(without)}")
    return said


def _most_freed(cells: Sequence[Cell]) -> list[str]:
    """How near the batches come to what freeing can give at most."""
    many = [cell for cell in cells if cell["planners"]["pipedream"]["batch"] >= MANY]
    ratio = batch_ratio("dawnpiper", "pipedream")
    found = [(value, cell["devices"]) for cell in many if (value := ratio(cell)) is not None]
    if not found:
        return []
    mean, most = geometric_mean([value for value, _ in found]), max(found)
    return [
        "what is recomputed is made again inside the backward, by planners of ops and of layers alike: one "
        "micro-batch is never there in full, and what remains is checkpoints, the scratch of the widest ops "
        f"and the state, which no treatment frees. Where pipedream has a plan for {MANY} rows or more, "
        f"dawnpiper has one for {mean:.2f} times as many on average, at most {most[0]:.2f} times on "
        f"{most[1]} devices; with few rows, ratios of whole numbers are larger"
    ]


MANY = 10
KINDS = ("state", "residuals", "boundary", "transient")
"""Of what is held at the peak: parameters with their gradients, optimizer state and versions, and buffers;
residuals; messages; scratch of one action."""


def fullest(plan: Any) -> dict[str, Any]:
    """The stage of a plan that fills most of its cap, and the shares of its peak by kind."""
    stage = max(range(len(plan.stages)), key=lambda s: plan.stages[s].memory.total / plan.caps[s])
    memory = plan.stages[stage].memory
    other = memory.residuals + memory.boundary + memory.transient
    sizes = (memory.total - other, memory.residuals, memory.boundary, memory.transient)
    shares = {kind: round(size / memory.total, 4) for kind, size in zip(KINDS, sizes, strict=True)}
    filled = round(memory.total / plan.caps[stage], 4)
    return {"stage": stage, "stages": len(plan.stages), "filled": filled, **shares}


# --- the cells --------------------------------------------------------------------------

SCHEDULES = {"flush": "1f1b", "stash": "async_1f1b"}
DEVICES = (4, 8)
TIGHT = (1.0, 1.3)
FULL = "A100-40GB"


def keys(devices: Sequence[int]) -> list[tuple[int, str, str]]:
    """(devices, weights, cap) of a model's cells, the most important first. Under tight caps on 4 devices
    only, which is enough to tell."""
    full = [(count, weights, FULL) for count in devices for weights in SCHEDULES]
    tight = [(DEVICES[0], weights, f"x{factor}") for weights in SCHEDULES for factor in TIGHT]
    return full + (tight if DEVICES[0] in devices else [])


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
    options = PlanOptions(
        ranks=count, microbatches=PER_DEVICE * count, schedule=SCHEDULES[weights], planner=planner
    )
    return PlanRequest(cluster=cluster, options=options)


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


def one_cell(
    model: str, count: int, weights: str, cap: str, samples_at: Path, until: float
) -> dict[str, Any] | None:
    """A cell; None if it is later than `until`."""
    if time.time() > until:
        return None
    cluster = find_cluster(f"{count} x a100-40")
    take = samples(*pickle.loads(samples_at.read_bytes()), cluster)
    size = cluster.devices[0].memory_bytes
    if cap != FULL:
        size = ceil(float(cap.removeprefix("x")) * least_cap(cluster, weights, "pipedream", take))
    named = f"{NAMES[model]}, {count} devices, {weights}, {cap} ({format_bytes(size)})"
    known = {"name": named, "model": NAMES[model], "devices": count, "cap": cap}
    return known | cell(with_cap(cluster, size), weights, take)


def captured(model: str, samples_at: Path) -> dict[str, Any]:
    """Capture a model at two sizes, for the cells. Returns what it is."""
    from models import REAL

    from pipeloom import capture

    begin, job = time.process_time(), REAL[model].job
    found = [ProfiledModel(size=n, graph=capture(job, n).graph, profiles={}) for n in CAPTURED]
    samples_at.write_bytes(pickle.dumps(found))
    return {
        "model": model,
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
        "model": model,
        "rows": size,
        "has_a_plan": plan is not None,
        "shapes_as_interpolated": shapes(again) == shapes(take(size)),
        "samples_per_s": samples_per_s(plan) if plan else 0.0,
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
    rows = [
        {"cells of": name, "ratio": ratio, **row}
        for name, group in groups(found).items()
        for ratio, row in compared(group).items()
    ]
    print_table(rows, "Planners against each other")
    for sentence in reasons(found):
        print(sentence)


# --- really run ---------------------------------------------------------------------------------------

STEPS = 2
ROWS = 3
"""The cap is the least with which pipedream trains micro-batches of so many rows."""


def run_models(models: list[str], ranks: list[int]) -> bool:
    """Every model on every number of ranks. Returns whether each did what was planned."""
    from models import SMALL

    passed = True
    for count in ranks:
        for key in models:
            found = run_model(key, count)
            passed &= all(row["passed"] for row in found["planners"].values())
            passed &= bool(found["kept_all"]["stopped_by"])
            for planner, row in found["planners"].items():
                print(line_of(SMALL[key].name, count, planner, row), flush=True)
            rows = [{"planner": planner, **row} for planner, row in found["planners"].items()]
            print_table(rows, f"{SMALL[key].name}, {count} ranks, cap {format_bytes(found['cap_bytes'])}")
            kept = found["kept_all"]
            print(f"  {kept['batch']} rows, all kept: {kept['stopped_by'] or 'NOT STOPPED'}")
            print(f"  with stashed weights: {found['asynchronous']}", flush=True)
    return passed


def run_model(key: str, ranks: int) -> dict[str, Any]:
    """All planners under one cap."""
    from models import SMALL

    cluster = find_cluster(f"{ranks} x cpu")
    job = SMALL[key].job

    @lru_cache
    def take(size: int) -> Any:
        return captured_model(job, size, cluster)

    cap = least_cap(cluster, "flush", "pipedream", take, ROWS)
    capped = with_cap(cluster, cap)
    found = {}
    start = ROWS
    with tempfile.TemporaryDirectory() as folder:
        for planner in PLANNERS:
            how = planning(capped, "flush", planner)
            plan, _ = largest_plan(how.changed(microbatch_size=start), take)
            start = plan.microbatch_size
            ran = run(key, plan, Path(folder) / planner)
            more = plan.microbatch_size + 1
            refused = planned(how, take, more) is None
            if not ran["stopped_by"] and PLANNERS_BY_NAME[planner].optimises == "never":
                own = planned(replace(how, cluster=with_cap(cluster, 1 << 50)), take, more)
                assert own is not None, "under a cap of a pebibyte everything fits"
                forced = run(key, replace(own, caps=(cap,) * ranks), Path(folder) / f"{planner}, more")
                ran["own_plan_stopped_by"] = "" if forced["steps"] else forced["stopped_by"]
            found[planner] = rank_row(plan, ran, refused=refused)
        free = with_cap(cluster, 1 << 50)
        kept = planned(planning(free, "flush", "dawnpiper"), take, start + 1)
        assert kept is not None, "under a cap of a pebibyte everything fits"
        forced = run(key, replace(kept, caps=(cap,) * ranks), Path(folder) / "forced")
    return {
        "cap_bytes": cap,
        "planners": found,
        "kept_all": {"batch": start + 1, "stopped_by": "" if forced["steps"] else forced["stopped_by"]},
        "asynchronous": asynchronous(capped, take),
    }


def rank_row(plan: Plan, ran: dict[str, Any], *, refused: bool) -> dict[str, Any]:
    fits = ran["steps"] == STEPS and max(ran["peak_bytes"]) <= plan.caps[0]
    return {
        "batch": plan.microbatch_size,
        "planned_peak_bytes": [s.memory.total for s in plan.stages],
        "recomputed_bytes": sum(s.recomputed_bytes for s in plan.stages),
        "offloaded_bytes": sum(s.offloaded_bytes for s in plan.stages),
        "estimated_samples_per_s": samples_per_s(plan),
        **ran,
        "one_more_refused": refused,
        "passed": fits and refused and bool(ran["stopped_by"] or ran.get("own_plan_stopped_by")),
    }


def run(key: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """Train with a plan; then a step with one row more per micro-batch, which passes the cap. stopped_by:
    the words with which the ranks ended, "" if they did not."""
    folder.mkdir()
    plan.save(folder / "plan.json")
    with quiet():
        launch(train, len(plan.stages), args=(key, folder))
    found: dict[str, Any] = {"steps": 0, "stopped_by": ""}
    if (report := folder / "report.json").exists():
        found |= json.loads(report.read_text())
    if (stopped := folder / "stopped.txt").exists():
        found["stopped_by"] = stopped.read_text()
    return found


def train(key: str, folder: Path) -> None:
    """What each rank does; rank 0 writes what it saw, and the rank that passes its cap writes that."""
    from models import SMALL

    torch.set_num_threads(1)
    job, plan = SMALL[key].job, load_plan(folder / "plan.json")
    rows = plan.microbatches * plan.microbatch_size
    losses, took = [], []
    try:
        with Pipeline(job, plan) as pipeline:
            for seed in range(STEPS):
                losses.append(pipeline.step(job.batch(seed, rows)))
                assert pipeline.report is not None, "there is one after a step"
                took.append(pipeline.report.step_s)
            seen = {
                "steps": STEPS,
                "losses": losses,
                "peak_bytes": list(pipeline.report.peak_bytes),
                "samples_per_s": rows / min(took),
            }
            if pipeline.rank == 0:
                (folder / "report.json").write_text(json.dumps(seen))
            pipeline.step(job.batch(STEPS, rows + plan.microbatches))
    except (MemoryCapError, InfeasibleError) as error:
        (folder / "stopped.txt").write_text(error.message.splitlines()[0])
        raise


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the report of ranks that are meant to fail off the terminal."""
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def asynchronous(cluster: Any, take: ModelAt) -> str:
    """What the runtime says of a plan with stashed weights."""
    plan = planned(planning(cluster, "stash", "dawnpiper"), take, 1)
    if plan is None:
        return "no plan fits the cap"
    try:
        require_runnable_plan(plan)
    except ScheduleError as error:
        return f"refused: {error.message}"
    return "runs"


def line_of(model: str, ranks: int, planner: str, row: dict[str, Any]) -> str:
    """One line: what was planned, and what happened."""
    peak = max(row.get("peak_bytes", [0]))
    return (
        f"{model}, {ranks} ranks, {planner}: {row['batch']} rows, {row['steps']} steps, peak "
        f"{format_bytes(peak)} ({peak / max(row['planned_peak_bytes']) - 1:+.1%} of the plan); "
        f"{row['batch'] + 1} rows: {'refused' if row['one_more_refused'] else 'PLANNED'}, run all the same: "
        f"{row['stopped_by'] or own_plan(row)}"
    )


def own_plan(row: dict[str, Any]) -> str:
    """What became of one row more where the plan for fewer rows can carry it."""
    stopped = row.get("own_plan_stopped_by") or "NOT STOPPED"
    return f"not stopped; with the planner's own plan for it: {stopped}"


# --- main -----------------------------------------------------------------------------------------


def simulate_all(models: list[str], devices: list[int], jobs: int, minutes: float) -> None:
    """All cells, some at a time, each in a process of its own; none begins after so many minutes."""
    until = time.time() + 60 * minutes
    pool_of = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as folder, pool_of as pool:
        samples_of = {model: Path(folder) / model for model in models}
        print_table(list(pool.map(captured, models, samples_of.values())), "Models")
        begun = [
            pool.submit(one_cell, model, *key, samples_of[model], until)
            for key in keys(devices)
            for model in models
        ]
        cells = []
        for each in begun:
            if (made := each.result()) is not None:
                cells.append(made)
                print(row_of(made), flush=True)
        print(f"{len(cells)} of {len(begun)} cells")
        sizes = {
            made["model"]: made["planners"]["dawnpiper"]["batch"]
            for made in cells
            if (made["devices"], made["weights"], made["cap"]) == (DEVICES[0], "flush", FULL)
        }
        again = [
            pool.submit(checked, model, size, samples_of[model])
            for model in models
            if (size := sizes.get(NAMES[model]))
        ]
        print_table([each.result() for each in again], "dawnpiper's largest size, captured")
    print_comparison(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("simulated", "run"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), help="simulated ones")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--jobs", type=int, default=2, help="cells simulated at the same time")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no cell after that time")
    options = parser.parse_args()
    print_stamp()
    if options.only in (None, "simulated"):
        simulate_all(options.models, options.devices, options.jobs, options.minutes)
    passed = True
    if options.only in (None, "run"):
        passed = run_models(options.models, options.ranks)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
