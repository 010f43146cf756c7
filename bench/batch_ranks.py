"""Largest micro-batches, really run: small models on gloo ranks of this machine, under the ledger's cap.

For each planner: the plan with the largest micro-batches that fit runs some steps, with every rank's peak
under its cap; one row more is refused by the planner, and the ledger stops the run when a batch has it. Where
the same cut carries it all the same (a planner that does not look at memory may cut worse for more rows), the
plan that the planner makes for it without a cap is run, and is to be stopped. A plan made without a cap, with
everything kept, is refused by the forecast of the ranks before they train; so are plans with stashed weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from max_batch import PLANNERS, least_cap, planned, planning, samples_per_s, with_cap
from models import SMALL

from pipeloom import Pipeline
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import InfeasibleError, MemoryCapError, ScheduleError
from pipeloom.ir.plan import Plan, load_plan
from pipeloom.ir.units import format_bytes
from pipeloom.planner.registry import PLANNERS as PLANNERS_BY_NAME
from pipeloom.planning import ModelAt, captured_model, largest_plan
from pipeloom.runnable import require_runnable_plan
from pipeloom.runtime.launch.launch import launch

STEPS = 2
ROWS = 3
"""The cap is the least with which pipedream trains micro-batches of so many rows."""


def run_models(models: list[str], ranks: list[int], keep: Callable[[str, Any], None]) -> bool:
    """Every model on every number of ranks. Returns whether each did what was planned."""
    passed = True
    for count in ranks:
        for key in models:
            found = run_model(key, count)
            keep(f"{key}, {count} ranks", found)
            passed &= all(row["passed"] for row in found["planners"].values())
            passed &= bool(found["kept_all"]["stopped_by"])
            for planner, row in found["planners"].items():
                print(line_of(SMALL[key].name, count, planner, row), flush=True)
            kept = found["kept_all"]
            print(f"  {kept['batch']} rows, all kept: {kept['stopped_by'] or 'NOT STOPPED'}")
            print(f"  with stashed weights: {found['asynchronous']}", flush=True)
    return passed


def run_model(key: str, ranks: int) -> dict[str, Any]:
    """All planners under one cap."""
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
            found[planner] = row_of(plan, ran, refused=refused)
        free = with_cap(cluster, 1 << 50)
        kept = planned(planning(free, "flush", "dawnpiper"), take, start + 1)
        assert kept is not None, "under a cap of a pebibyte everything fits"
        forced = run(key, replace(kept, caps=(cap,) * ranks), Path(folder) / "forced")
    return {
        "model": SMALL[key].name,
        "ranks": ranks,
        "cap_bytes": cap,
        "planners": found,
        "kept_all": {"batch": start + 1, "stopped_by": "" if forced["steps"] else forced["stopped_by"]},
        "asynchronous": asynchronous(capped, take),
    }


def row_of(plan: Plan, ran: dict[str, Any], *, refused: bool) -> dict[str, Any]:
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
