"""All planners together: the step of `--planner auto` beside those of the planners that it asks.

    python bench/auto.py [--only NAME ...]

Models with and without branches, with room and without, 16 micro-batches, on devices by roofline. All is
simulated; of the planners' seconds only processor time is given. 3 minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import branching
from machine import print_stamp, print_table
from pipeoffload_planner import gpt

from pipeloom import Job, plan_request, planning
from pipeloom.clusters.names import find_cluster
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.notes import planners_asked
from pipeloom.planner.request import PlanOptions

MICROBATCHES = 16


@dataclass(frozen=True)
class Case:
    """A model, its rows per micro-batch, and devices.

    share: caps, of the most that a rank of the plan by `exact` holds with no cap; none: what devices have.
    """

    job: Callable[[], Job]
    rows: int
    cluster: str
    share: float | None = None


CASES = {
    "GPT": Case(lambda: gpt(8, 512, 8, 256), 8, "4 x a100-40"),
    "GPT, 0.6 of its memory": Case(lambda: gpt(8, 512, 8, 256), 8, "4 x a100-40", 0.6),
    "case study": Case(branching.PUBLISHED["case_study"], 8, "2 nodes of 4 x v100-16"),
    "MMT": Case(branching.PUBLISHED["mmt"], 2, "2 nodes of 4 x v100-16"),
    "CANDLE-Uno": Case(branching.PUBLISHED["candle"], 256, "1 nodes of 4 x v100-16"),
    "CLIP": Case(branching.PUBLISHED["clip"], 8, "1 nodes of 4 x v100-16"),
}


def measure(case: Case) -> dict[str, Any]:
    """Seconds of the step of each planner that is asked, of the order that was searched, and of the plan."""
    cluster = find_cluster(case.cluster)
    graph = planning.capture(case.job(), case.rows).graph
    model = ProfiledModel(size=case.rows, graph=graph, profiles=planning.estimate(graph, cluster))
    request = plan_request.PlanRequest(
        cluster=cluster,
        options=PlanOptions(ranks=len(cluster.devices), microbatches=MICROBATCHES),
    )
    cap = None
    if case.share is not None:
        free = request.changed(treatments=()).plan(model, explained=False)
        cap = round(case.share * max(free.peaks))
        devices = tuple(replace(device, memory_bytes=cap) for device in cluster.devices)
        request = replace(request, cluster=replace(cluster, devices=devices))
    begin = time.process_time()
    plan = request.changed(planner="auto").plan(model, explained=False)
    return {
        "cluster": case.cluster,
        "cap_bytes": cap,
        "asked_s": planners_asked(plan),
        "step_s": plan.predicted_step_s,
        "peak_bytes": max(plan.peaks),
        "schedule": plan.schedule,
        "processor_s": round(time.process_time() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    chosen = parser.parse_args().only
    print_stamp()
    print_table([{"case": name, **measure(CASES[name])} for name in chosen])


if __name__ == "__main__":
    main()
