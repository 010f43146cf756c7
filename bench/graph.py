"""Stages as a DAG against stages as a chain. Writes bench/results/graph.json.

    python bench/graph.py                    everything, about 70 minutes on two cores
    python bench/graph.py --only brute       one part: models, launches, case, order, random, brute, huge
    python bench/graph.py --only models --keys "mmt 8" --minutes 7 --again

Results are written as they come, and a part goes on where it was left; `--again` begins it anew, with
`--keys` these keys only.

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
import json
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
from machine import keep, load

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from branching_graphs import KINDS as GRAPH_KINDS, best_of_all, random_graph, request_for, step_s  # noqa: E402

from pipeloom import plan_request, planning  # noqa: E402
from pipeloom.clusters.names import find_cluster  # noqa: E402
from pipeloom.ir.cluster import Cluster  # noqa: E402
from pipeloom.ir.errors import InfeasibleError, PlanError  # noqa: E402
from pipeloom.ir.plan import Plan  # noqa: E402
from pipeloom.ir.stages import sequential  # noqa: E402
from pipeloom.lowering.passes import lower  # noqa: E402
from pipeloom.planner.make_plan import make_plan  # noqa: E402
from pipeloom.planner.microbatch_sizes import ProfiledModel, interpolate_sample  # noqa: E402
from pipeloom.planner.plan_costs import PlanCosts  # noqa: E402
from pipeloom.planner.request import PlanOptions  # noqa: E402
from pipeloom.profiler.roofline import roofline  # noqa: E402
from pipeloom.simulator.simulate import simulate  # noqa: E402

Found: TypeAlias = dict[str, Any]
"""The results of a part: what is known already is given to it, and stays."""

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


def case(found: Found) -> Iterator[Found]:
    """The case study, two branches, joined, on 8 devices, after each size of micro-batches."""
    found.setdefault("rows", 128)
    at, kinds = models_at("case_study"), ("graphpipe", "chain")
    for _ in widths_and_sizes(found, cluster_of(8), FIRST_SIZE["case_study"], at, kinds, widths=False):
        yield found
    print("case study:", json.dumps(found["best"]), flush=True)
    # The same under caps that the DAG just keeps to, with micro-batches of each size. Planners count messages
    # by a bound: a cap of just a plan's peak does not give that plan again.
    for key in sorted(found["cells"], key=lambda key: -found["cells"][key]["graphpipe"]["peak_bytes"]):
        capped(found, round(1.03 * found["cells"][key]["graphpipe"]["peak_bytes"]), at, kinds)
        yield found


def capped(
    found: Found, cap_bytes: int, at: Callable[[int, Cluster], ProfiledModel], kinds: Sequence[str]
) -> None:
    """The case study under a cap per device: step of each kind by rows of a micro-batch, and the shortest."""
    cluster = cluster_of(8)
    devices = tuple(replace(device, memory_bytes=cap_bytes) for device in cluster.devices)
    cluster = replace(cluster, devices=devices)
    row: Found = {kind: {} for kind in kinds}
    for key in found["cells"]:
        size = Cell(*map(int, key.split(" x "))).size
        for kind, figures in figures_at(
            Cell(1, size), cluster, found["rows"], at(size, cluster), kinds, {}
        ).items():
            row[kind][str(size)] = figures["step_s"]
    best = {kind: min(row[kind].values(), default=None) for kind in kinds}
    found.setdefault("capped", {})[str(cap_bytes)] = {**row, "best": best}
    print(f"case study under {cap_bytes / 2**30:.3f} GiB:", json.dumps(row), flush=True)


def order(found: Found) -> Iterator[Found]:
    """Seconds of a step of MMT on 8 devices, its towers one after another and in turn."""
    for name in ("mmt", "mmt_in_turn"):
        graph, cluster = planning.capture(branching.PUBLISHED[name](), 4).graph, cluster_of(8)
        model = ProfiledModel(size=4, graph=graph, profiles=planning.estimate(graph, cluster))
        found[name] = plan_of("graphpipe", cluster, 128, model).predicted_step_s
    print("order:", found, flush=True)
    yield found


def at_random(found: Found, count: int = 200) -> Iterator[Found]:
    """Whether `graphpipe` is ever slower than the others, after each graph."""
    found = {"graphs": 0, "planned": 0, "faster": 0, "slower": []} | found
    for seed in range(found["graphs"], count):
        dice = random.Random(seed)
        graph, profile = random_graph(seed, dice.randint(6, 40), GRAPH_KINDS[seed % 3])
        how = request_for(graph, profile, dice.randint(2, 6), slack=dice.uniform(1, 1.3))
        dag = step_s(how)
        other = min(step_s(how, "exact"), step_s(how, branches=False))
        found["graphs"] += 1
        found["planned"] += dag < float("inf")
        found["faster"] += dag < other * (1 - 1e-6)
        if dag > other * (1 + 1e-6):
            found["slower"].append(seed)
        yield found
    print("random:", json.dumps(found), flush=True)


def brute(found: Found, count: int = 500) -> Iterator[Found]:
    """Plans against the best of all convex partitions, after each graph. misses: seed -> ratio."""
    found = {"graphs": 0, "with_a_plan": 0, "no_plan_found": 0, "misses": {}} | found
    for seed in range(found["graphs"], count):
        dice = random.Random(seed + 10**6)
        ops, stages = dice.randint(5, 8), dice.randint(2, 4)
        graph, profile = random_graph(seed, ops, "series-parallel")
        how = request_for(graph, profile, stages, slack=dice.choice([None, 1.0, 1.1, 1.3]))
        planned = step_s(how)
        least = best_of_all(how, stages, below=planned)
        found["graphs"] += 1
        found["with_a_plan"] += least < float("inf")
        if least < float("inf") and planned == float("inf"):
            found["no_plan_found"] += 1
        elif least < float("inf") and planned > least * (1 + 1e-9):
            found["misses"][str(seed)] = planned / least
        missed = found["no_plan_found"] + len(found["misses"])
        found["optimal"] = found["with_a_plan"] - missed
        found["share"] = found["optimal"] / max(1, found["with_a_plan"])
        found["worst_ratio"] = max(found["misses"].values(), default=1.0)
        yield found
    print("brute:", json.dumps(found), flush=True)


def huge(found: Found) -> Iterator[Found]:
    """Seconds to plan a graph of 10,000 ops, after each number of devices."""
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
            "ops": len(graph.ops),
            "processor_s": took,
            "bottleneck_over_ideal": max(part.turn_s for part in plan.stages) / ideal,
            "notes": dict(plan.notes),
        }
        found[str(devices)] = row
        print(f"huge on {devices}:", json.dumps(row), flush=True)
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", nargs="+", default=(), help='of models and launches, such as "mmt 8"')
    run: dict[str, Callable[[Found], Iterator[Found]]] = {
        "models": lambda found: models(found, options.keys),
        "launches": lambda found: launches(found, options.keys),
        "case": case,
        "order": order,
        "random": at_random,
        "brute": brute,
        "huge": huge,
    }
    parser.add_argument("--only", choices=tuple(run), nargs="+", default=tuple(run))
    parser.add_argument("--again", action="store_true", help="forget what the results have")
    parser.add_argument("--minutes", type=float, help="stop each part after so many")
    options = parser.parse_args()
    for part in options.only:
        found = load("graph").get(part, {})
        if options.again:
            found = {key: row for key, row in found.items() if options.keys and key not in options.keys}
        end = time.monotonic() + 60 * (options.minutes or float("inf"))
        for done in run[part](found):
            keep("graph", part, done)
            if time.monotonic() > end:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
