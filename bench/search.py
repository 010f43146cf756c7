"""How long planners of whole graphs search, in one process. Writes bench/results/search.json.

    python bench/search.py                     MMT on 8 to 32 devices, CANDLE-Uno on 8: 1 minute
    python bench/search.py --graphs FILE ...   also graphs in Piper's JSON format

Processor seconds, the least of three, of the search alone: on a graph that is captured and profiled, before
anything is simulated. All cut at layers, one device per stage, every residual kept. `graphpipe` searches the
places between layers in branch order; `pipedream-graph` the graph's antichains; `piper` its down-sets, whose
number it refuses beyond 40,000. The bottleneck is the slowest stage by compute. The paper (arXiv 2406.17145)
reports 9 to 21 times for its own implementations of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import branching
import numpy as np
from machine import describe_machine

from pipeloom import api
from pipeloom.clusters import find_cluster
from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.profile import Profile
from pipeloom.planner import PLANNERS, PlanOptions, Request, read_piper_graph
from pipeloom.planner.search import Search, borders, layers
from pipeloom.planner.strategies import shallow_cuts
from pipeloom.profiler import roofline

RESULTS = Path(__file__).parent / "results" / "search.json"
ROWS = {"mmt": 4, "candle": 64}
DEVICES = {"mmt": (8, 16, 32), "candle": (8,)}
ROUNDS = 3


def search_for(graph: OpGraph, profile: Profile, devices: int) -> Search:
    """The search for one stage on each of so many V100s, with what it needs of the graph made already."""
    cluster = find_cluster(f"{devices} x v100-32")
    options = PlanOptions(treatments=())
    request = Request(graph, profile, cluster, "1f1b", 4 * devices, options, PLANNERS["graphpipe"])
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


def compare(name: str, graph: OpGraph, profile: Profile, devices: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for planner, find in FINDERS.items():
        search = search_for(graph, profile, devices)
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
    print(f"{name} on {devices}:", json.dumps(found), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=Path, nargs="*", default=[], help="in Piper's format")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe_machine()}
    for name, rows in ROWS.items():
        graph = api.capture(branching.PUBLISHED[name](), rows).graph
        profile = roofline(graph, find_cluster("v100-32").devices[0])
        for devices in DEVICES[name]:
            results[f"{name} {devices}"] = compare(name, graph, profile, devices)
    for path in options.graphs:
        graph, profile = read_piper_graph(path).as_model()
        for devices in (4, 8):
            results[f"{path.stem} {devices}"] = compare(path.stem, graph, profile, devices)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
