"""Stages as a DAG against stages as a chain; prints a table per part.

    python bench/graph.py --only brute       one part: models, launches, case, order, random, brute, huge
    python bench/graph.py --only models --keys "mmt 8"

Each key of `models` and `launches` stops after --minutes; a table then says that cells are missing.

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
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import branching
from layered import layered_towers
from machine import print_stamp, print_table

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from branching_graphs import KINDS as GRAPH_KINDS, best_of_all, random_graph, request_for, step_s  # noqa: E402

from pipeloom import plan_request, planning  # noqa: E402
from pipeloom.clusters.names import find_cluster  # noqa: E402
from pipeloom.ir.cluster import Cluster  # noqa: E402
from pipeloom.ir.errors import InfeasibleError, PlanError  # noqa: E402
from pipeloom.ir.plan import Plan  # noqa: E402
from pipeloom.ir.stages import sequential  # noqa: E402
from pipeloom.lowering.passes import lower  # noqa: E402
from pipeloom.planner.microbatch_sizes import ProfiledModel, interpolate_sample  # noqa: E402
from pipeloom.planner.plan_costs import PlanCosts  # noqa: E402
from pipeloom.planner.planners import make_plan  # noqa: E402
from pipeloom.planner.request import PlanOptions  # noqa: E402
from pipeloom.profiler.roofline import roofline  # noqa: E402
from pipeloom.simulator.simulate import simulate  # noqa: E402

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
    first, second = (planning.capture(branching.PUBLISHED[name](), rows).graph for rows in SAMPLES[name])

    def at(rows: int, cluster: Cluster) -> ProfiledModel:
        ends = [
            ProfiledModel(size=size, graph=graph, profiles=planning.estimate(graph, cluster))
            for size, graph in zip(SAMPLES[name], (first, second), strict=True)
        ]
        return interpolate_sample(ends[0], ends[1], rows)

    return at


def plan_of(kind: str, cluster: Cluster, rows: int, model: ProfiledModel, width: int = 1) -> Plan:
    """A plan for all devices, every residual kept. Raises: PlanError if it is refused, or does not fit."""
    planner, branches = KINDS[kind]
    request = plan_request.PlanRequest(
        cluster=cluster,
        options=PlanOptions(
            ranks=len(cluster.devices) // width,
            replicas=width,
            microbatches=width,
            planner=planner,
            global_batch=rows,
            branches=branches,
            treatments=(),
        ),
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


def climb(
    rows: int,
    cluster: Cluster,
    first: int,
    at: Callable[[int, Cluster], ProfiledModel],
    kinds: Sequence[str] = tuple(KINDS),
    *,
    widths: bool = True,
    sizes: Sequence[int] = (),
    minutes: float = inf,
) -> dict[Cell, Figures]:
    """All cells that a climb from one pipeline tries. All kinds try the same cells, so that none ends up in a
    worse one than another.

    rows: of a step.  first: rows of a micro-batch in the first cell.  sizes: the only rows of a micro-batch
    that are tried; none: any.  minutes: after which no further cell is begun.
    """
    ends = time.monotonic() + 60 * minutes
    cells: dict[Cell, Figures] = {}
    refused: dict[str, str] = {}
    wanted = [Cell(1, first)]
    while wanted and time.monotonic() < ends:
        cell = wanted[0]
        cells[cell] = figures_at(cell, cluster, rows, at(cell.size, cluster), kinds, refused)
        wanted = next_cells(cells, rows, len(cluster.devices), kinds, widths=widths, sizes=sizes)
    for kind, why in refused.items():
        print(f"{kind} is refused: {why}")
    if wanted:
        print(f"stopped after {minutes:g} minutes: {wanted[0].key} and maybe others are missing")
    return cells


def print_best(title: str, cells: Mapping[Cell, Figures], rows: int, kinds: Sequence[str]) -> None:
    """The fastest cell of each kind, with any number of pipelines side by side and with one."""
    one = {cell: figures for cell, figures in cells.items() if cell.width == 1}
    lines = [
        {"pipelines": name, "kind": kind, **row}
        for name, chosen in (("any", cells), ("one", one))
        for kind, row in summary(chosen, rows, kinds).items()
    ]
    print_table(lines, title)
    print("gain over the sequential chain by rows of a micro-batch:", gain_by_size(one), flush=True)


def models(only: Sequence[str], minutes: float) -> None:
    """Each model on each number of devices. only: such as "mmt 8"; all if there are none."""
    for name in ROWS_PER_DEVICE:
        chosen = [devices for devices in DEVICES if not only or f"{name} {devices}" in only]
        at = models_at(name) if chosen else None
        for devices in chosen:
            assert at is not None
            rows, sizes = ROWS_PER_DEVICE[name] * devices, FEW_SIZES[name] if devices == 32 else ()
            cells = climb(rows, cluster_of(devices), FIRST_SIZE[name], at, sizes=sizes, minutes=minutes)
            print_best(f"{name} {devices}", cells, rows, tuple(KINDS))


def launches(only: Sequence[str], minutes: float) -> None:
    """The same in one pipeline where each kernel takes longer besides its work: small micro-batches then have
    a price."""
    kinds = ("graphpipe", "chain")
    for key, times in LAUNCHES.items():
        name, devices = key.split()
        chosen = {f"{key}, {launch_s * 1e6:.0f} us": launch_s for launch_s in times}
        chosen = {title: launch_s for title, launch_s in chosen.items() if not only or title in only}
        at = models_at(name) if chosen else None
        for title, launch_s in chosen.items():
            assert at is not None
            rows, cluster = ROWS_PER_DEVICE[name] * int(devices), cluster_of(int(devices), launch_s)
            cells = climb(rows, cluster, FIRST_SIZE[name], at, kinds, widths=False, minutes=minutes)
            print_best(title, cells, rows, kinds)


def case(minutes: float) -> None:
    """The case study, two branches, joined, on 8 devices; then under caps that the DAG just keeps to, with
    micro-batches of each size. Planners count messages by a bound: a cap of just a plan's peak does not give
    that plan again."""
    rows, at, kinds = 128, models_at("case_study"), ("graphpipe", "chain")
    cells = climb(rows, cluster_of(8), FIRST_SIZE["case_study"], at, kinds, widths=False, minutes=minutes)
    print_best("case study", cells, rows, kinds)
    lines = []
    for peak in sorted((figures["graphpipe"]["peak_bytes"] for figures in cells.values()), reverse=True):
        cap = round(1.03 * peak)
        cluster = cluster_of(8)
        devices = tuple(replace(device, memory_bytes=cap) for device in cluster.devices)
        cluster = replace(cluster, devices=devices)
        for cell in cells:
            found = figures_at(cell, cluster, rows, at(cell.size, cluster), kinds, {})
            steps = {kind: found.get(kind, {}).get("step_s") for kind in kinds}
            lines.append({"cap, GiB": cap / 2**30, "rows": cell.size, **steps})
    print_table(lines, "case study under caps: seconds of a step")


def order() -> None:
    """Seconds of a step of MMT on 8 devices, its towers one after another and in turn."""
    lines = []
    for name in ("mmt", "mmt_in_turn"):
        graph, cluster = planning.capture(branching.PUBLISHED[name](), 4).graph, cluster_of(8)
        model = ProfiledModel(size=4, graph=graph, profiles=planning.estimate(graph, cluster))
        lines.append({"model": name, "step_s": plan_of("graphpipe", cluster, 128, model).predicted_step_s})
    print_table(lines)


def at_random(count: int) -> None:
    """Whether `graphpipe` is ever slower than the others."""
    planned, faster, slower = 0, 0, []
    for seed in range(count):
        dice = random.Random(seed)
        graph, profile = random_graph(seed, dice.randint(6, 40), GRAPH_KINDS[seed % 3])
        how = request_for(graph, profile, dice.randint(2, 6), slack=dice.uniform(1, 1.3))
        dag = step_s(how)
        other = min(step_s(how, "exact"), step_s(how, branches=False))
        planned += dag < inf
        faster += dag < other * (1 - 1e-6)
        if dag > other * (1 + 1e-6):
            slower.append(seed)
    print_table([{"graphs": count, "planned": planned, "faster": faster, "slower, seeds": slower}], "random")


def brute(count: int) -> None:
    """Plans against the best of all convex partitions. misses: ratios of those that are not the best."""
    with_a_plan, no_plan_found, misses = 0, 0, []
    for seed in range(count):
        dice = random.Random(seed + 10**6)
        ops, stages = dice.randint(5, 8), dice.randint(2, 4)
        graph, profile = random_graph(seed, ops, "series-parallel")
        how = request_for(graph, profile, stages, slack=dice.choice([None, 1.0, 1.1, 1.3]))
        planned = step_s(how)
        least = best_of_all(how, stages, below=planned)
        with_a_plan += least < inf
        if least < inf and planned == inf:
            no_plan_found += 1
        elif least < inf and planned > least * (1 + 1e-9):
            misses.append(planned / least)
    optimal = with_a_plan - no_plan_found - len(misses)
    row = {"graphs": count, "with a plan": with_a_plan, "optimal": optimal, "no plan found": no_plan_found}
    print_table([row | {"misses": sorted(misses, reverse=True)}], "brute")


def huge() -> None:
    """Seconds to plan a graph of 10,000 ops."""
    lines = []
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
            ranks=devices,
            schedule="1f1b",
            microbatches=2 * devices,
            planner="graphpipe",
            options=options,
        )
        took = time.process_time() - begin
        ideal = sum(cost.forward_s + cost.backward_s for cost in profile.costs.values()) / devices
        row = {
            "devices": devices,
            "ops": len(graph.ops),
            "processor_s": took,
            "bottleneck_over_ideal": max(part.turn_s for part in plan.stages) / ideal,
            "notes": dict(plan.notes),
        }
        lines.append(row)
    print_table(lines, "huge")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", nargs="+", default=(), help='of models and launches, such as "mmt 8"')
    parser.add_argument("--minutes", type=float, default=9.0, help="after which a key begins no cell")
    parser.add_argument("--graphs", type=int, help="of random and brute; default 200 and 500")
    run: dict[str, Callable[[], None]] = {
        "models": lambda: models(options.keys, options.minutes),
        "launches": lambda: launches(options.keys, options.minutes),
        "case": lambda: case(options.minutes),
        "order": order,
        "random": lambda: at_random(options.graphs or 200),
        "brute": lambda: brute(options.graphs or 500),
        "huge": huge,
    }
    parser.add_argument("--only", choices=tuple(run), nargs="+", default=tuple(run))
    options = parser.parse_args()
    print_stamp()
    for part in options.only:
        run[part]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
