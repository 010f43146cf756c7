"""How long planners of whole graphs search, in one process; prints a table.

    python bench/search.py                     MMT on 8 to 32 devices, CANDLE-Uno on 8: 1 minute
    python bench/search.py --graphs FILE ...   graphs in Piper's JSON format instead, on --devices 4 8; with
                                               --milliseconds for those that count in them (gnmt, resnet)

Processor seconds, the least of three, of the search alone: on a graph that is captured and profiled, before
anything is simulated. All cut at layers, one device per stage, every residual kept. `graphpipe` searches the
places between layers in branch order; `pipedream-graph` the graph's antichains; `piper` its down-sets, whose
number it refuses beyond 40,000. The bottleneck is the slowest stage by compute. The paper (arXiv 2406.17145)
reports 9 to 21 times for its own implementations of the others. Piper's own program also gives several
devices to one stage and recomputes; here all have the same freedom, and a file's own memory and bandwidth.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import branching
import numpy as np
from machine import print_stamp, print_table
from piper_graphs import read_piper_graph

from pipeloom import planning
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.profile import Profile
from pipeloom.planner.registry import PLANNERS
from pipeloom.planner.request import PlanOptions, Request
from pipeloom.planner.search.cut_search import Search
from pipeloom.planner.search.layer_groups import borders, layers
from pipeloom.planner.strategies.graphpipe import shallow_cuts
from pipeloom.profiler.roofline import roofline

ROWS = {"mmt": 4, "candle": 64}
DEVICES = {"mmt": (8, 16, 32), "candle": (8,)}
ROUNDS = 3


def search_for(graph: OpGraph, profile: Profile, cluster: Cluster) -> Search:
    """The search for one stage on each device, with what it needs of the graph made already."""
    options = PlanOptions(microbatches=4 * len(cluster.devices), planner="graphpipe", treatments=())
    request = Request(graph, profile, cluster, options, PLANNERS["graphpipe"])
    search = replace(request.search(), by_depth=True)
    search.model.row(0, np.array([1]))  # sums over the graph, shared by all planners
    return search


def bottleneck_s(search: Search, ops: tuple[int, ...], cuts: tuple[int, ...]) -> float:
    """Compute of the slowest stage. ops: positions in the order of the search, stage by stage."""
    seconds = np.diff(search.model.prefix_s[0])[list(ops)]
    return float(max(seconds[a:b].sum() for a, b in zip(cuts, cuts[1:], strict=False)))


def by_graphpipe(search: Search) -> tuple[float, int]:
    places = np.array(borders(layers(search.model.readers.ops), search.model.cut_points.tolist()))
    cuts = next(shallow_cuts(search, places), ())
    if not cuts:
        raise PlanError("no cut fits")
    return bottleneck_s(search, tuple(range(len(search.model))), cuts), len(cuts) - 1


def by_chain(name: str) -> Callable[[Search], tuple[float, int]]:
    def find(search: Search) -> tuple[float, int]:
        arrange = PLANNERS[name].arrange
        assert arrange is not None, "a planner of whole graphs"
        arranged = arrange(search)
        if arranged is None:
            raise PlanError("no cut fits")
        order = search.model.readers.order or tuple(range(len(search.model)))
        place = {op: index for index, op in enumerate(order)}
        return bottleneck_s(search, tuple(place[op] for op in arranged.ops), arranged.cuts), len(
            arranged.cuts
        ) - 1

    return find


FINDERS = {
    "graphpipe": by_graphpipe,
    "pipedream-graph": by_chain("pipedream-graph"),
    "piper": by_chain("piper"),
}


def compare(graph: OpGraph, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Of each planner processor seconds, seconds of the slowest stage and devices, or why it refuses."""
    found: dict[str, Any] = {}
    for planner, find in FINDERS.items():
        search = search_for(graph, profile, cluster)
        try:
            took = []
            for _ in range(ROUNDS):
                begin = time.process_time()
                bottleneck, used = find(search)
                took.append(time.process_time() - begin)
            found[planner] = {"seconds": min(took), "bottleneck_s": bottleneck, "devices": used}
        except PlanError as error:
            found[planner] = {"refused": error.message}
    mine = found["graphpipe"].get("seconds")
    for planner in ("pipedream-graph", "piper"):
        if mine and "seconds" in found[planner]:
            found[f"{planner} over graphpipe"] = found[planner]["seconds"] / mine
    return found


def compare_models() -> dict[str, Any]:
    """MMT and CANDLE-Uno on V100s."""
    results = {}
    for name, rows in ROWS.items():
        graph = planning.capture(branching.PUBLISHED[name](), rows).graph
        profile = roofline(graph, find_cluster("v100-32").devices[0])
        for devices in DEVICES[name]:
            cluster = find_cluster(f"{devices} x v100-32")
            results[f"{name} {devices}"] = compare(graph, profile, cluster)
    return results


def compare_file(path: Path, devices: Iterable[int], seconds_per_unit: float = 1.0) -> dict[str, Any]:
    """A graph in Piper's format on so many of its devices. Raises: PlanError if it cannot be read."""
    read = read_piper_graph(path, seconds_per_unit=seconds_per_unit)
    return {f"{path.stem} {count}": compare(*read.as_model(count)) for count in devices}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=Path, nargs="*", default=[], help="in Piper's format")
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8), help="for these graphs")
    parser.add_argument("--milliseconds", action="store_true", help="their times are in milliseconds")
    options = parser.parse_args()
    print_stamp()
    results = {} if options.graphs else compare_models()
    for path in options.graphs:
        results |= compare_file(path, options.devices, 1e-3 if options.milliseconds else 1.0)
    print_table([{"graph": name, **row} for name, row in results.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
