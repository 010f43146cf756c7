"""Every planner on a grid of models, devices, caps and widths: a plan, or a refusal that is true.

    python bench/planner_grid.py [--models NAME ...] [--planners NAME ...] [--schedules NAME ...]

Small models of `tests/support/zoo.py` and `bench/graphpipe.py`, captured once each, are planned as by
`pipeloom plan`: "here" is this machine with measured times, the others are by roofline. A cap is a share of
the fullest rank of the plan by `exact` without one. Planners of many schedules are asked under caps on 2
ranks only. Ask for one model at a time: each cell is told on stderr when it is done.

A refusal is *true* if no other planner has a plan for the same schedule in the same cell. If one has, the
planner's entry in the registry may say why it has none:

    keeps all             (optimises) the other one frees some residuals
    layers, modules       (granularity) the other one cuts smaller pieces, or there are too few of these
    own account           (arrange) it orders ops and counts memory in a way of its own, for a chain
    memory not looked at  (keeps_caps)

Otherwise it is *false*. The status is 1 if one is, or if anything ends in an exception that is not ours.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from multiprocessing import get_context
from typing import TypeAlias

import torch
from machine import parser_of, print_stamp, print_table

# isort: split
import zoo
from graphpipe import SMALL

from pipeloom import Job, PipeloomError, plan_request, planning
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.planner.planners import PLANNERS, ByOrder, JointPlanner, OneSchedule

MODELS: Mapping[str, Callable[[], Job]] = {
    "GPT": lambda: zoo.job("gpt"),
    "Llama": lambda: zoo.job("llama"),
    "T5": lambda: zoo.job("t5"),
    "two towers": SMALL["clip"],
    "MLP": lambda: zoo.job("skips"),
    "experts": lambda: zoo.job("mixtral"),
}
DEVICES = {"here": None, "4 x a100-40": "4 x a100-40", "unequal": "2 x a100-40 + 2 x v100-16"}
RANKS = {"here": 2}
"""Of a cell; 4 elsewhere."""

WIDTHS = (1, 2)
CAP = 0.85
ROWS, MICROBATCHES = 16, 4
SIZES = {"op": 0, "module": 1, "layer": 2}
"""Granularities, the finest first."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """model, devices: keys of the tables.  cap_bytes: of each rank; None for what it has."""

    model: str
    devices: str
    schedule: str
    width: int
    cap_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one planner came to.

    refusal: its message, "" if there is a plan.  crash: the traceback of anything else.
    schedule: of the plan.  frees: it recomputes or offloads.
    """

    step_s: float | None = None
    peak_bytes: int = 0
    schedule: str = ""
    frees: bool = False
    refusal: str = ""
    crash: str = ""
    seconds: float = 0.0


Rows: TypeAlias = Sequence[tuple[Cell, Mapping[str, Outcome]]]


def planned(request: plan_request.PlanRequest, model: plan_request.CapturedModel) -> Outcome:
    begin = time.process_time()
    try:
        plan = request.plan(model, explained=False)
        found = Outcome(
            step_s=plan.predicted_step_s,
            peak_bytes=max(plan.peaks),
            schedule=plan.schedule,
            frees=any(part.recomputed_bytes or part.offloaded_bytes for part in plan.stages),
        )
    except PipeloomError as error:
        found = Outcome(refusal=f"{type(error).__name__}: {error.message}")
    except Exception:  # what this looks for: it is told with its cell, and the grid goes on
        found = Outcome(crash=traceback.format_exc())
    return replace(found, seconds=round(time.process_time() - begin, 2))


def outcomes(name: str, planners: Sequence[str], schedules: Sequence[str]) -> Rows:
    """All cells of one model."""
    torch.set_num_threads(1)
    job = MODELS[name]()
    captured = planning.capture(job, ROWS)
    rows: list[tuple[Cell, Mapping[str, Outcome]]] = []
    for devices, schedule, width in product(DEVICES, schedules, WIDTHS):
        named = DEVICES[devices]
        cluster = None if named is None else find_cluster(named)
        model = planning.captured_model(job, ROWS, cluster, captured=captured)
        cell = Cell(model=name, devices=devices, schedule=schedule, width=width)
        free = by_planners(cell, job, model, cluster, planners)
        rows.append((cell, free))
        if (full := free["exact"].peak_bytes) > 0:
            capped = replace(cell, cap_bytes=round(CAP * full))
            few = planners if ranks_of(cell) < 3 else [n for n in planners if not is_slow(n)]
            rows.append((capped, by_planners(capped, job, model, cluster, few)))
    return rows


def ranks_of(cell: Cell) -> int:
    """Of one pipeline."""
    return RANKS.get(cell.devices, 4) // cell.width


def is_slow(planner: str) -> bool:
    """Whether a planner plans with many schedules."""
    return isinstance(PLANNERS[planner].plan, JointPlanner)


def by_planners(
    cell: Cell, job: Job, model: plan_request.CapturedModel, cluster: Cluster | None, planners: Sequence[str]
) -> dict[str, Outcome]:
    found = {}
    for planner in planners:
        request = planning.make_request(
            ranks=ranks_of(cell),
            replicas=cell.width,
            microbatches=MICROBATCHES,
            schedule=cell.schedule,
            memory=cell.cap_bytes,
            cluster=cluster,
            planner=planner,
        )
        found[planner] = planned(request, model)
    dear = ", ".join(f"{name} {one.seconds:.1f}" for name, one in found.items() if one.seconds > 1)
    print(f"{cell}: {dear or 'at most 1'} s", file=sys.stderr, flush=True)
    return found


def verdict(planner: str, cell: Cell, found: Mapping[str, Outcome]) -> str:
    """Of a refusal: "true", its nature, or "FALSE" with a planner that has a plan."""
    own = PLANNERS[planner]
    others = [name for name, one in found.items() if one.step_s is not None and one.schedule == cell.schedule]
    if not others:
        return "true"
    if own.optimises != "always":
        others = [name for name in others if not found[name].frees]
    if not others:
        return "keeps all"
    others = [name for name in others if SIZES[PLANNERS[name].granularity] >= SIZES[own.granularity]]
    few = own.granularity != "op" and not found[planner].refusal.startswith("InfeasibleError")
    if not others or few:
        return f"{own.granularity}s"
    search = own.plan.finder.own if isinstance(own.plan, OneSchedule) else None
    if isinstance(search, ByOrder):
        return "own account"
    looks = search is None or search.keeps_caps
    return f"FALSE: {', '.join(others)}" if looks else "memory not looked at"


def told(planner: str, cell: Cell, found: Mapping[str, Outcome]) -> str:
    """One field of the table."""
    if planner not in found:
        return "not asked"
    one = found[planner]
    if one.step_s is not None:
        return f"{1e3 * one.step_s:.4g}/{one.peak_bytes >> 10}"
    return "CRASH" if one.crash else verdict(planner, cell, found)


def print_cells(rows: Rows) -> None:
    """A line for each planner, a column for each cell of a model."""
    print("ms of the step / KiB of the fullest rank; or of the refusal whether it is true")
    for (model, schedule), group in groupby(rows, key=lambda row: (row[0].model, row[0].schedule)):
        cells = list(group)
        lines = []
        for planner in rows[0][1]:
            line = {"planner": planner}
            for cell, found in cells:
                cap = "" if cell.cap_bytes is None else f", {cell.cap_bytes >> 10} KiB"
                line[f"{cell.devices}, {cell.width}{cap}"] = told(planner, cell, found)
            lines.append(line)
        print_table(lines, f"{model}, {schedule}")


def wrong(rows: Rows) -> Iterator[str]:
    """What must not be, one line each."""
    for cell, found in rows:
        for name, one in found.items():
            if one.crash:
                yield f"{name} crashed for {cell}:\n{one.crash}"
            elif one.step_s is None and (said := verdict(name, cell, found)).startswith("FALSE"):
                yield f"{name} refused {cell}: {one.refusal}\n    {said}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--planners", nargs="+", choices=tuple(PLANNERS), default=tuple(PLANNERS))
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    asked = parser.parse_args()
    planners = list(dict.fromkeys(("exact", *asked.planners)))  # caps are shares of the first one's
    ask = partial(outcomes, planners=planners, schedules=asked.schedules)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(ask, name) for name in asked.models]
        rows = [row for part in parts for row in part.result()]
    print_stamp()
    print_cells(rows)
    found_wrong = list(wrong(rows))
    print("\n".join(found_wrong))
    seconds = sum(one.seconds for _, found in rows for one in found.values())
    count = sum(len(found) for _, found in rows)
    print(
        f"{count} plans or refusals in {len(rows)} cells, {len(found_wrong)} wrong, {seconds:.0f} processor s"
    )
    return 1 if found_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
