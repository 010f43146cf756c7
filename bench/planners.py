"""Planners against each other: distance from the best plan, seconds of the search, schedules, memory.

    python bench/planners.py graphs search

The parts, with minutes of one core:

graphs   8: 500 random graphs with the real cost and memory model, tensors recomputed and offloaded, 2 to 5
         stages, caps 1.0 to 1.3 times the smallest found; half with transfers that cost time. Planners
         against the exact one, and PipeDream's programme for the time that it takes.
search   1: planners of whole graphs, on graphs captured and profiled, nothing simulated: MMT on 8 to 32
         devices, CANDLE-Uno on 8. Processor seconds, the least of three. All cut at layers, one device per
         stage, every residual kept: `graphpipe` in branch order, `pipedream-graph` over antichains, `piper`
         over down-sets. The paper (arXiv 2406.17145): 9 to 21 times for its implementations of the others.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from machine import parser_of, print_table, run_parts

# isort: split
import random_stages
from graphpipe import PUBLISHED
from layered import layered

from pipeloom import capture
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.profile import Profile
from pipeloom.planner.planners import PLANNERS, ByCuts, ByOrder, finder_of
from pipeloom.planner.refusals import least_share
from pipeloom.planner.request import PlanOptions, Request
from pipeloom.planner.search.cut_search import Search
from pipeloom.planner.search.layer_groups import borders, layers
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.planner.strategies.graphpipe import shallow_cuts
from pipeloom.profiler.roofline import roofline

Table = list[dict[str, Any]]
BOTH = ("recompute", "offload")


def summary(ratios: Sequence[float], weighed: Sequence[int]) -> dict[str, Any]:
    """What is said of one planner: cases, plans found, ratios of those found, stages weighed."""
    found = [ratio for ratio in ratios if ratio < inf]
    return {
        "cases": len(ratios),
        "found": len(found),
        "within_5_percent": sum(r <= 1.05 for r in found),
        "mean_ratio": mean(found) if found else None,
        "worst_ratio": max(found, default=None),
        "weighed_on_average": mean(weighed),
    }


# --- graphs ---------------------------------------------------------------------------------------


def random_search(rng: random.Random) -> Search:
    """With no cap: of a graph of ops drawn one by one, or of a small transformer of random sizes."""
    stages, slow = rng.choice((2, 3, 4, 5)), rng.random() < 0.5
    if rng.random() < 0.5:
        model = random_stages.random_model(
            rng.randrange(10**6), rng.randint(16, 28), host_bytes_per_s=rng.choice((5, 40, 200))
        )
        link = Link(bandwidth_bytes_per_s=10 ** rng.uniform(1, 3) if slow else 1e15)
        graph, profile, options = model.graph, model.profile, model.options
        cluster = Cluster(devices=model.cluster.devices[:stages], within_node=link)
    else:
        depth, hidden, length = rng.randint(1, 2), 128 * rng.randint(2, 12), 128 * rng.randint(1, 12)
        graph = layered(depth, hidden=hidden, length=length, rows=rng.randint(1, 8))
        cluster = find_cluster(f"{stages} x a100-40")
        link = Link(bandwidth_bytes_per_s=10 ** rng.uniform(9, 11) if slow else 1e18)
        cluster, profile = replace(cluster, within_node=link), roofline(graph, cluster.devices[0])
        options = CostOptions(microbatches=4 * stages)
    return free_search(graph, profile, cluster, options)


def free_search(graph: OpGraph, profile: Profile, cluster: Cluster, options: CostOptions) -> Search:
    stages = len(cluster.devices)
    costs = CostModel(graph, [profile] * stages, cluster, options)
    return Search(model=costs, caps=(1 << 50,) * stages, in_flight=tuple(range(stages, 0, -1)))


class Timing(NamedTuple):
    """What one planner made of a case: seconds of the slowest stage, stages weighed, processor seconds."""

    slowest_s: float
    weighed: int
    cpu_s: float


def timing(search: Search, name: str) -> Timing:
    own = replace(search, known={})  # what others have weighed is not known
    begin = time.process_time()
    finder = finder_of(name).own
    assert isinstance(finder, ByCuts), "a planner that cuts the op order"
    cuts = finder.find(own)
    spent = time.process_time() - begin
    weighed = sum(map(len, own.known.values()))
    if not cuts:
        return Timing(inf, weighed, spent)
    stages = [own.evaluate(i, j, s) for s, (i, j) in enumerate(pairwise(cuts))]
    return Timing(max(stage.seconds for stage in stages), weighed, spent)


PLANNERS_OF_GRAPHS = ("exact", "dawnpiper", "probe", "vpipe", "pipedream")


def on_graph(seed: int) -> tuple[bool, dict[str, Timing]]:
    """Whether transfers cost time, and what each planner made of it."""
    rng = random.Random(seed)
    treatments, factor = rng.choice((BOTH, BOTH, BOTH[:1])), rng.uniform(1.0, 1.3)
    search = random_search(rng)
    share, _ = least_share(replace(search, treatments=treatments))
    caps = tuple(int(cap * share * factor) for cap in search.caps)
    tight = replace(search, caps=caps, treatments=treatments)
    return search.slowest_link < 1e12, {name: timing(tight, name) for name in PLANNERS_OF_GRAPHS}


def on_graphs(count: int) -> Table:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=25) as pool:
        cases = list(pool.map(on_graph, range(count), chunksize=25))
    seconds = {name: mean(made[name].cpu_s for _, made in cases) for name in PLANNERS_OF_GRAPHS}
    print_table([seconds], "Processor seconds of a search")
    rows = []
    for transfers in (False, True):
        known = [made for slow, made in cases if slow == transfers and made["exact"].slowest_s < inf]
        for name in ("dawnpiper", "probe", "vpipe") if known else ():
            ratios = [made[name].slowest_s / made["exact"].slowest_s for made in known]
            said = summary(ratios, [made[name].weighed for made in known])
            rows.append({"transfers": transfers, "planner": name, **said})
    return rows


# --- search ---------------------------------------------------------------------------------------

SEARCHED = {"mmt": (4, (8, 16, 32)), "candle": (64, (8,))}
"""Model -> its rows, and numbers of devices."""


def layer_search(graph: OpGraph, profile: Profile, cluster: Cluster) -> Search:
    """The search for one stage on each device, with what it needs of the graph made already."""
    options = PlanOptions(microbatches=4 * len(cluster.devices), planner="graphpipe", treatments=())
    search = Request(graph, profile, cluster, options, PLANNERS["graphpipe"]).search()
    search = replace(search, by_depth=True)
    search.model.row(0, np.array([1]))  # sums over the graph, shared by all planners
    return search


def found_by(planner: str, search: Search) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ops in the order of the search, stage by stage, and where they are cut."""
    if planner == "graphpipe":
        places = np.array(borders(layers(search.model.readers.ops), search.model.cut_points.tolist()))
        cuts = next(shallow_cuts(search, places), ())
        if not cuts:
            raise PlanError("no cut fits")
        return tuple(range(len(search.model))), cuts
    own = finder_of(planner).own
    assert isinstance(own, ByOrder), "a planner of whole graphs"
    arranged = own.arrange(search)
    if arranged is None:
        raise PlanError("no cut fits")
    order = search.model.readers.order or tuple(range(len(search.model)))
    place = {op: index for index, op in enumerate(order)}
    return tuple(place[op] for op in arranged[0].ops), arranged[1]


def searched(name: str, graph: OpGraph, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Of each planner processor seconds, seconds of the slowest stage and devices, or why it refuses."""
    row: dict[str, Any] = {"graph": name, "devices": len(cluster.devices)}
    for planner in ("graphpipe", "pipedream-graph", "piper"):
        search, took = layer_search(graph, profile, cluster), []
        try:
            for _ in range(3):
                begin = time.process_time()
                ops, cuts = found_by(planner, search)
                took.append(time.process_time() - begin)
        except PlanError as error:
            row[planner] = {"refused": error.message}
            continue
        seconds = np.diff(search.model.tables.prefix_s[0])[list(ops)]
        slowest_s = max(float(seconds[a:b].sum()) for a, b in pairwise(cuts))
        row[planner] = {"seconds": min(took), "slowest_s": slowest_s, "used": len(cuts) - 1}
    return row


def search() -> Table:
    rows = []
    for name, (size, counts) in SEARCHED.items():
        graph = capture(PUBLISHED[name](), size).graph
        clusters = [find_cluster(f"{count} x v100-32") for count in counts]
        rows += [searched(name, graph, roofline(graph, c.devices[0]), c) for c in clusters]
    return rows


def main() -> int:
    run: dict[str, Callable[[], Table]] = {
        "graphs": lambda: on_graphs(given.count),
        "search": search,
    }
    parser = parser_of(__doc__, run)
    parser.add_argument("--count", type=int, default=500, help="of graphs")
    given = parser.parse_args()
    return run_parts(given.parts, run)


if __name__ == "__main__":
    sys.exit(main())
