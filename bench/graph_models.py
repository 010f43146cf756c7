"""The parts `models` and `launches` of graph.py: what stages as a DAG gain where width and size are free."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, TypeAlias

import branching

from pipeloom import api
from pipeloom.clusters import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.ir.plan import Plan
from pipeloom.ir.stages import sequential
from pipeloom.lowering import lower
from pipeloom.planner import PlanCosts, PlanOptions, ProfiledModel, interpolate_sample
from pipeloom.simulator import simulate

DEVICES = (4, 8, 16, 32)
ROWS_PER_DEVICE = {"mmt": 16, "dlrm": 128, "candle": 512}
FIRST_SIZE = {"mmt": 2, "dlrm": 256, "candle": 512, "case_study": 4}
"""Rows of the micro-batches that are tried first."""
FEW_SIZES = {"mmt": (1, 2, 4), "dlrm": (128, 256, 512), "candle": (256, 512, 1024)}
"""Rows of the micro-batches that are tried on 32 devices, where a plan takes long: those around the fastest
ones on fewer devices. Elsewhere all are, as far as the climb gets."""
SAMPLES = {"mmt": (2, 4), "dlrm": (8, 16), "candle": (16, 32), "case_study": (2, 4)}
"""Rows at which a model is captured; between and beyond these it is interpolated."""

KINDS = {
    "graphpipe": ("graphpipe", True),
    "chain": ("graphpipe", False),
    "pipedream-graph": ("pipedream-graph", False),
    "piper": ("piper", False),
}
"""Kind -> (planner, whether its stages may run side by side)."""

LAUNCHES = {"mmt 8": (5e-5, 2e-4), "mmt 32": (5e-5, 2e-4)}
"""Model and devices -> seconds that each kernel takes besides its work; a V100: 4e-6."""


class Cell(NamedTuple):
    """Pipelines side by side, and rows of a micro-batch."""

    width: int
    size: int

    @property
    def key(self) -> str:
        return f"{self.width} x {self.size}"


Figures: TypeAlias = dict[str, dict[str, Any]]
"""Kind -> its figures in one cell; one that does not fit, or is refused, is missing."""


def cluster_of(devices: int, launch_s: float | None = None) -> Cluster:
    """V100s of 16 GB, 4 in each node: those that the paper used of Summit's."""
    found = find_cluster(f"{devices // 4} nodes of 4 x v100-16" if devices > 4 else f"{devices} x v100-16")
    if launch_s is None:
        return found
    return replace(found, devices=tuple(replace(device, launch_s=launch_s) for device in found.devices))


def models_at(name: str) -> Callable[[int, Cluster], ProfiledModel]:
    """(rows, cluster) -> the model of published size."""
    first, second = (api.capture(branching.PUBLISHED[name](), rows).graph for rows in SAMPLES[name])

    def at(rows: int, cluster: Cluster) -> ProfiledModel:
        ends = [
            ProfiledModel(size=size, graph=graph, profiles=api.estimate(graph, cluster))
            for size, graph in zip(SAMPLES[name], (first, second), strict=True)
        ]
        return interpolate_sample(ends[0], ends[1], rows)

    return at


def plan_of(kind: str, cluster: Cluster, rows: int, model: ProfiledModel, width: int = 1) -> Plan:
    """A plan for all devices, every residual kept. Raises: PlanError if it is refused, or does not fit."""
    strategy, branches = KINDS[kind]
    request = api.PlanRequest(
        stages=len(cluster.devices) // width,
        width=width,
        microbatches=width,
        cluster=cluster,
        strategy=strategy,
        global_batch=rows,
        options=PlanOptions(branches=branches, treatments=()),
    )
    return request.plan(model, explained=False)


def sequential_s(plan: Plan, model: ProfiledModel, cluster: Cluster) -> float:
    """Seconds of the simulated step if every stage also waits for the one in front of it, and for the
    gradient of the one behind it."""
    in_a_row = sequential(plan.replicated(plan.stage_graph(model.graph)))
    costs = PlanCosts(model.graph, model.profiles, cluster).stages(plan)
    program = lower(plan.as_schedule, in_a_row, policy=plan.memory)
    return simulate(program, in_a_row, costs, cluster).step_s


def figures_at(
    cell: Cell,
    cluster: Cluster,
    rows: int,
    model: ProfiledModel,
    kinds: Sequence[str],
    refused: dict[str, str],
) -> Figures:
    """The plans of one cell. refused: kind -> why, is filled; these are not asked again."""
    found: Figures = {}
    for kind in kinds:
        if kind in refused:
            continue
        try:
            plan = plan_of(kind, cluster, rows, model, cell.width)
        except InfeasibleError:
            continue
        except PlanError as error:
            refused[kind] = error.message
            continue
        depth = int(plan.notes.get("branches.depth", str(len(plan.stages))))
        figure = {"step_s": plan.predicted_step_s, "peak_bytes": max(plan.peaks), "depth": depth}
        found[kind] = {**figure, "stages": len(plan.stages)}
        if not KINDS[kind][1]:
            found[kind]["sequential_s"] = sequential_s(plan, model, cluster)
    return found


def best_cell(cells: Mapping[Cell, Figures], kind: str, seconds: str) -> Cell | None:
    """The cell in which a kind is fastest; None if it has a plan in none."""
    return min(
        (cell for cell in cells if kind in cells[cell]),
        key=lambda cell: cells[cell][kind].get(seconds, inf),
        default=None,
    )


def ways(kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Kinds, and by which seconds they are judged: chains also as sequential pipelines."""
    for kind in kinds:
        yield kind, "step_s"
        if not KINDS[kind][1]:
            yield kind, "sequential_s"


def next_cells(
    cells: Mapping[Cell, Figures],
    rows: int,
    devices: int,
    kinds: Sequence[str],
    *,
    widths: bool,
    sizes: Sequence[int] = (),
) -> list[Cell]:
    """Cells that are still to be tried: twice and half the size and the width of each kind's fastest one, and
    of the best chain's as a sequential pipeline. sizes: no others; none: any."""
    wanted: dict[Cell, None] = {}
    for kind, seconds in [*((kind, "step_s") for kind in kinds), ("chain", "sequential_s")]:
        if (best := best_cell(cells, kind, seconds)) is None:
            continue
        width, size = best
        wanted |= dict.fromkeys([Cell(width, 2 * size), Cell(width, size // 2)])
        if widths:
            wanted |= dict.fromkeys([Cell(2 * width, size), Cell(width // 2, size)])
    if not wanted:  # nothing fits yet
        wanted[Cell(1, min(cell.size for cell in cells) // 2)] = None
    return [
        cell
        for cell in wanted
        if cell not in cells
        and (cell.size in sizes if sizes else cell.size > 0)
        and 0 < cell.width <= devices // 2
        and cell.width * cell.size <= rows
    ]


def summary(cells: Mapping[Cell, Figures], rows: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Each kind in its fastest cell, and how much faster the DAG is than each of the others: in all, and by
    stages side by side alone, in the cell in which the other is fastest."""
    row: dict[str, Any] = {}
    for kind, seconds in ways(kinds):
        if (cell := best_cell(cells, kind, seconds)) is None:
            continue
        name = kind if seconds == "step_s" else f"{kind} sequential"
        own = cells[cell][kind]
        best = {"width": cell.width, "microbatch_size": cell.size, "rows_per_s": rows / own[seconds]}
        row[name] = {**best, "peak_bytes": own["peak_bytes"], "depth": own["depth"]}
        if kind != "graphpipe" and "graphpipe" in row:
            row[name]["gain"] = row["graphpipe"]["rows_per_s"] / row[name]["rows_per_s"]
            if "graphpipe" in cells[cell]:
                row[name]["gain_in_its_cell"] = own[seconds] / cells[cell]["graphpipe"]["step_s"]
    return row


def gain_by_size(cells: Mapping[Cell, Figures]) -> dict[str, float]:
    """Rows of a micro-batch -> how much faster the DAG is than the best chain as a sequential pipeline."""
    return {
        str(cell.size): figures["chain"]["sequential_s"] / figures["graphpipe"]["step_s"]
        for cell, figures in sorted(cells.items())
        if {"chain", "graphpipe"} <= figures.keys()
    }


def widths_and_sizes(
    row: dict[str, Any],
    cluster: Cluster,
    first: int,
    at: Callable[[int, Cluster], ProfiledModel],
    kinds: Sequence[str] = tuple(KINDS),
    *,
    widths: bool = True,
    sizes: Sequence[int] = (),
) -> Iterator[None]:
    """Climb from one pipeline, after each cell. All kinds try the same cells, so that none ends up in a worse
    one than another.

    first: rows of a micro-batch in the first cell.  row: what is known, and stays; is filled.
    sizes: the only rows of a micro-batch that are tried; none: any.
    """
    if sizes:
        row["only_sizes"] = list(sizes)
    rows, known = row["rows"], row.setdefault("cells", {})
    refused = row.setdefault("refused", {})
    limits = {"widths": widths, "sizes": sizes}
    while True:
        cells = {Cell(*map(int, key.split(" x "))): figures for key, figures in known.items()}
        wanted = next_cells(cells, rows, len(cluster.devices), kinds, **limits) if cells else [Cell(1, first)]
        if cells:
            row["best"] = summary(cells, rows, kinds)
            one = {cell: figures for cell, figures in cells.items() if cell.width == 1}
            row["one_pipeline"] = summary(one, rows, kinds)
            row["gain_by_size"] = gain_by_size(one)
            row["settled"] = not wanted
        if not wanted:
            return
        begin = time.process_time()
        cell = wanted[0]
        known[cell.key] = figures_at(cell, cluster, rows, at(cell.size, cluster), kinds, refused)
        row["processor_s"] = row.get("processor_s", 0.0) + time.process_time() - begin
        print(f"  {cell.key}, {time.process_time() - begin:.0f} s:", json.dumps(known[cell.key]), flush=True)
        yield


def models(found: dict[str, Any], only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each model on each number of devices, after each cell.

    found: what is known already, and stays.  only: such as "mmt 8"; all if there are none.
    """
    for name in ROWS_PER_DEVICE:
        at = None
        for devices in DEVICES:
            key = f"{name} {devices}"
            if (only and key not in only) or found.get(key, {}).get("settled"):
                continue
            at = at or models_at(name)
            rows = ROWS_PER_DEVICE[name] * devices
            row = found.setdefault(key, {"rows": rows})
            sizes = FEW_SIZES[name] if devices == 32 else ()
            for _ in widths_and_sizes(row, cluster_of(devices), FIRST_SIZE[name], at, sizes=sizes):
                yield found
            print(f"{key}:", json.dumps(row["best"]), flush=True)
            yield found


def launches(found: dict[str, Any], only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The same in one pipeline where each kernel takes longer besides its work, after each cell: small
    micro-batches then have a price."""
    for key, times in LAUNCHES.items():
        name, devices = key.split()
        at = models_at(name)
        for launch_s in times:
            own = f"{key}, {launch_s * 1e6:.0f} us"
            if (only and own not in only) or found.get(own, {}).get("settled"):
                continue
            rows = ROWS_PER_DEVICE[name] * int(devices)
            row = found.setdefault(own, {"rows": rows})
            cluster = cluster_of(int(devices), launch_s)
            kinds = ("graphpipe", "chain")
            for _ in widths_and_sizes(row, cluster, FIRST_SIZE[name], at, kinds, widths=False):
                yield found
            print(f"{own}:", json.dumps(row["best"]), flush=True)
            yield found
