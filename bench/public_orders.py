"""Families of the library beside the orders of a public zero-bubble scheduler, timed here again.

    python bench/public_orders.py CLONE [--ranks 4 8 16] [--only po:v=4] [--minutes 7]

CLONE: a checkout of github.com/sail-sg/zero-bubble-pipeline-parallelism (figures: commit 3fd87fd), of which
only the modules that make orders are loaded. Cases: its eight schedules x ranks x 2 and 4 micro-batches per
rank x the seven time profiles of tests/schedules/test_long_messages.py. Both orders are timed by our
simulator. A case is lost where the public order is shorter and holds no more than ours.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from machine import print_stamp, print_table

from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, simulate_file, simulate_schedule

PACKAGE = "megatron.core.pipeline_parallel.zerobubble.scheduler"
PROFILES = [
    (1.0, 1.2, 0.9, 0.5),
    (1.0, 0.8, 1.2, 0.2),
    (1.0, 1.4, 0.6, 0.1),
    (1.0, 1.0, 1.0, 0.3),
    (1.0, 0.6, 1.4, 0.05),
    (1.0, 1.5, 0.5, 0.5),
    (1.0, 1.1, 0.8, 0.25),
]
"""F, I, W of a rank, and a message."""

Times = tuple[float, float, float, float]
Order = Iterable[Iterable[Any]]


class Public:
    """The modules of a clone, with empty ones in place of what they import and do not use here."""

    def __init__(self, clone: Path) -> None:
        folder = clone.joinpath(*PACKAGE.split("."))
        parts = PACKAGE.split(".")
        for count in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:count]))
            package.__path__ = [str(folder)] if count == len(parts) else []
            sys.modules[package.__name__] = package
        sys.modules["pulp"] = pulp = ModuleType("pulp")
        vars(pulp)["value"] = lambda known: known  # times are numbers where nothing is left to a solver
        self.graph, self.zb, self.zbv, self.greedy, self.groups = (
            importlib.import_module(f"{PACKAGE}.{name}")
            for name in ("graph", "zb", "zbv", "zbv_greedy", "group_interleaved_1f1b")
        )
        self.groups.GroupBuildingBlockScheduler.print_schedule = lambda *args, **options: None

    def config(self, ranks: int, m: int, times: Times, chunks: int, memory: float) -> Any:
        """What it is asked. memory: in micro-batches of one of its stages."""
        forward, back, weight, transfer = times
        return self.graph.GraphConfig(
            mem_f=[1.0] * ranks,
            mem_b=[0.0] * ranks,
            mem_w=[-1.0] * ranks,
            max_mem=[memory] * ranks,
            cost_f=[forward / chunks] * ranks,
            cost_b=[back / chunks] * ranks,
            cost_w=[weight / chunks] * ranks,
            cost_comm=transfer,
            max_chunks=chunks,
            n_stages=ranks,
            n_micro=m,
        )

    def single(self, ranks: int, m: int, times: Times, memory: float) -> Order:
        made: Order = self.zb.create_schedule(self.config(ranks, m, times, 1, memory))
        return made

    def v(self, ranks: int, m: int, times: Times) -> Order:
        cost = [round(1000 * t / 2) for t in times[:3]]
        graph = self.zbv.PipelineGraph(ranks, m, *cost, round(1000 * times[3]), 1, 0, -1, None)
        made: Order = graph.create_schedule(self.config(ranks, m, times, 2, 2 * ranks))
        return made

    def controlled(self, ranks: int, m: int, times: Times, kind: str) -> Order:
        """These know no times: all are taken for equal."""
        graph = self.greedy.PipelineGraph(ranks, m, kind, 1000, 1000, 1000, 1)
        made: Order = graph.create_schedule(self.config(ranks, m, times, 2, 2 * ranks))
        return made

    def grouped(self, ranks: int, m: int, times: Times, size: int) -> Order:
        config = self.config(ranks, m, times, 4, 4 * ranks)
        made: Order = self.groups.create_schedule(config, False, None, None, None, size, 0)
        return made


SCHEDULES: dict[str, Callable[[Public, int, int, Times], Order]] = {
    "zb_1p": lambda p, ranks, m, t: p.single(ranks, m, t, ranks),
    "zb_2p": lambda p, ranks, m, t: p.single(ranks, m, t, 2 * ranks),
    "zb_v": lambda p, ranks, m, t: p.v(ranks, m, t),
    "v_half": lambda p, ranks, m, t: p.controlled(ranks, m, t, "half"),
    "v_min": lambda p, ranks, m, t: p.controlled(ranks, m, t, "min"),
    "gis:v=4": lambda p, ranks, m, t: p.grouped(ranks, m, t, ranks),
    "gis_h:v=4": lambda p, ranks, m, t: p.grouped(ranks, m, t, (ranks + 1) // 2),
    "po:v=4": lambda p, ranks, m, t: p.grouped(ranks, m, t, 1),
}
"""Our name -> the public order."""


def rows(order: Order) -> Iterator[str]:
    """Rows as our files have them: their B is our I, their BW our B."""
    letters = {"F": "F", "B": "I", "W": "W", "BW": "B"}
    for row in order:
        yield " ".join(f"{n.layer_group_idx}{letters[str(n.type)]}{n.microbatch}" for n in row)


def measure(public: Public, name: str, ranks: int, m: int, times: Times) -> dict[str, Any]:
    """Both orders, timed by our simulator: their steps, spans and peaks."""
    forward, back, weight, transfer = times
    scenario = Scenario(
        ranks=ranks,
        microbatches=m,
        times=MicrobatchTimes(forward_s=forward, input_grad_s=back, weight_grad_s=weight),
        transfer_s=transfer,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        order = list(rows(SCHEDULES[name](public, ranks, m, times)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "public.txt"
        file.write_text("\n".join(order))
        theirs = simulate_file(file, scenario)
    ours = simulate_schedule(name, scenario)
    return {
        "schedule": name,
        "ranks": ranks,
        "microbatches": m,
        "times": list(times),
        "step": ours.summary.step_s,
        "peak": ours.peak,
        "public_step": theirs.summary.step_s,
        "public_peak": theirs.peak,
    }


def lost(case: dict[str, Any]) -> bool:
    shorter = case["public_step"] < case["step"] * (1 - 1e-6)
    return bool(shorter and case["public_peak"] <= case["peak"] + 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--only", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further case is begun")
    args = parser.parse_args()
    public, ends = Public(args.clone), time.monotonic() + 60 * args.minutes
    print_stamp()
    cases = []
    for ranks, factor, times, name in product(args.ranks, (2, 4), PROFILES, args.only):
        if time.monotonic() > ends:
            break
        cases.append(measure(public, name, ranks, factor * ranks, times))
    print_table([case for case in cases if lost(case)], "Cases in which ours is longer")
    print(f"{len(cases)} cases, {sum(map(lost, cases))} of them lost")


if __name__ == "__main__":
    main()
