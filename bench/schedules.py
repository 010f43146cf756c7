"""Schedules of the library beside those of others, timed by our simulator.

    python bench/schedules.py classes [--ranks 4 8 16 32] [--times 1 1 1] [--transfer 0]
    python bench/schedules.py orders --clone CLONE [--ranks 4 8 16] [--only po:v=4] [--minutes 7]

classes  PyPI's zbpp-light and torch.distributed.pipelining's own classes, on the same ranks, micro-batches
         and times: seconds to generate (and those of the processor alone), to check and lower, and to
         simulate; makespan and peak. No process group is needed.
orders   CLONE: a checkout of github.com/sail-sg/zero-bubble-pipeline-parallelism (figures: commit 3fd87fd),
         of which only the modules that make orders are loaded. Cases: its eight schedules x ranks x 2 and 4
         micro-batches per rank x the seven time profiles of tests/schedules/test_long_messages.py. A case
         is lost where the public order is shorter and holds no more than ours.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from machine import parser_of, run_parts
from torch.distributed.pipelining import schedules as theirs

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.schedule import Schedule
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, simulate_file, simulate_schedule
from pipeloom.simulator.simulate import simulate

# --- classes --------------------------------------------------------------------------------------

UNIT = 1 << 20

Rows = tuple[tuple[Action, ...], ...]

TORCH: dict[str, tuple[str, str]] = {
    "ScheduleInterleaved1F1B": ("interleaved_1f1b", "loop"),
    "ScheduleLoopedBFS": ("looped_bfs", "loop"),
    "ScheduleInterleavedZeroBubble": ("gis", "loop"),
    "ScheduleZBVZeroBubble": ("zb_v", "v"),
    "ScheduleDualPipeV": ("dualpipev", "v"),
}
"""Class -> the schedule of ours that is for the same placement."""

ALONE = ["1f1b", "zb_2p", "v_half", "v_min", "1f1b_v", "gis_h", "po", "hanayo"]


@dataclass(frozen=True)
class Cost:
    """times: of F, I and W on a rank.  transfer_s: of a message."""

    times: tuple[float, float, float]
    transfer_s: float


class FakeStage(SimpleNamespace):
    """What a schedule class asks of a stage before it runs anything."""

    def __getattr__(self, name: str) -> Any:
        return None


def torch_rows(name: str, ranks: int, microbatches: int) -> Rows:
    """The compute actions of one of torch's classes; pairs that overlap stand one after the other."""
    stages = [
        FakeStage(
            group_size=ranks,
            group_rank=0,
            num_stages=2 * ranks,
            stage_index=s,
            is_first=False,
            is_last=False,
            has_backward=True,
        )
        for s in (0, ranks if TORCH[name][1] == "loop" else 2 * ranks - 1)
    ]
    made: Any = getattr(theirs, name)(stages, microbatches, loss_fn=lambda *_: None)
    return tuple(tuple(_ours(made.pipeline_order[rank])) for rank in range(ranks))


def _ours(row: Iterable[Any]) -> Iterable[Action]:
    for a in row:
        if a is not None and a.sub_actions:
            yield from _ours(a.sub_actions)
        elif a is not None and a.computation_type.value in ("F", "B", "I", "W"):
            yield Action(a.stage_index, Kind(a.computation_type.value), a.microbatch_index)


def zbpp_rows(auto_schedule: Callable[[int, int], Any], ranks: int, microbatches: int) -> Rows:
    """zbpp-light's H1; its B is the input gradient."""
    letter = {"F": "F", "B": "I", "W": "W"}
    with redirect_stdout(StringIO()):  # it prints its rows
        made = auto_schedule(ranks, microbatches)
    return tuple(
        tuple(Action(n.stage, Kind(letter[n.type]), n.minibatch) for n in row if n.type in letter)
        for row in made
    )


def measure(who: str, generate: Callable[[], Rows], how: Cost, shape: dict[str, Any]) -> dict[str, Any]:
    """One line of the result."""
    started, worked = time.perf_counter(), time.process_time()
    rows = generate()
    generated, busy = time.perf_counter(), time.process_time()
    stages, placement = shape["stages"], shape["placement"]
    made = Schedule(name=who, microbatches=shape["m"], placement=placement, rows=rows)
    program = lower(made, stages)
    lowered = time.perf_counter()
    device = Device(name="any", memory_bytes=1)
    link = Link(bandwidth_bytes_per_s=float("inf"), latency_s=how.transfer_s)
    cluster = Cluster(devices=(device,) * made.ranks, within_node=link)
    timeline = simulate(program, stages, shape["costs"], cluster)
    ended = time.perf_counter()
    return {
        "who": who,
        "ranks": made.ranks,
        "microbatches": made.microbatches,
        "actions": sum(map(len, rows)),
        "generate_s": round(generated - started, 4),
        "generate_cpu_s": round(busy - worked, 4),
        "check_and_lower_s": round(lowered - generated, 4),
        "simulate_s": round(ended - lowered, 4),
        "makespan": timeline.step_s,
        "peak": max(peak.get("residuals", 0) for peak in timeline.peaks) / UNIT,
    }


def shape_of(name: str, ranks: int, microbatches: int, how: Cost) -> dict[str, Any]:
    """The stages of our schedule `name`, with the times of a rank shared evenly by its stages."""
    stages, placement = registry.default_placement(name, ranks)
    parts = len(placement) / ranks
    f, i, w = (t / parts for t in how.times)
    size = round(UNIT / parts)
    equal = equal_costs(len(placement), forward_s=f, input_grad_s=i, weight_grad_s=w, residual_bytes=size)
    costs = tuple(replace(cost, carried_bytes=size) for cost in equal)
    return {"stages": stages, "placement": placement, "costs": costs, "m": microbatches}


def ours(name: str, shape: dict[str, Any], how: Cost) -> Callable[[], Rows]:
    where = shape["stages"], shape["placement"], shape["m"]
    return lambda: registry.build(name, *where, costs=shape["costs"], transfer_s=how.transfer_s).rows


def classes(ranks_of: list[int], how: Cost) -> list[dict[str, Any]]:
    from zbpp_light.auto_schedule import auto_schedule

    lines = []
    for ranks in ranks_of:
        m = 4 * ranks
        rivals: list[tuple[str, str, Callable[[], Rows]]] = [
            ("zbpp-light H1", "zb_h1", partial(zbpp_rows, auto_schedule, ranks, m)),
            *(
                (f"torch {name}", own, partial(torch_rows, name, ranks, m))
                for name, (own, _) in TORCH.items()
            ),
        ]
        for who, own, generate in rivals:
            lines.append(measure(who, generate, how, shape_of(own, ranks, m, how)))
        for own in (*(own for _, own, _ in rivals), *ALONE):
            shape = shape_of(own, ranks, m, how)
            lines.append(measure(f"pipeloom {own}", ours(own, shape, how), how, shape))
    return lines


# --- orders ---------------------------------------------------------------------------------------

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


PUBLIC: dict[str, Callable[[Public, int, int, Times], Order]] = {
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


def beside_public(public: Public, name: str, ranks: int, m: int, times: Times) -> dict[str, Any]:
    """Both orders, timed by our simulator: their steps, spans and peaks."""
    forward, back, weight, transfer = times
    scenario = Scenario(
        ranks=ranks,
        microbatches=m,
        times=MicrobatchTimes(forward_s=forward, input_grad_s=back, weight_grad_s=weight),
        transfer_s=transfer,
    )
    with redirect_stdout(StringIO()):
        order = list(rows(PUBLIC[name](public, ranks, m, times)))
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


def orders(clone: Path, ranks_of: list[int], names: list[str], minutes: float) -> list[dict[str, Any]]:
    """The cases in which ours is longer."""
    public, ends = Public(clone), time.monotonic() + 60 * minutes
    cases = []
    for ranks, factor, times, name in product(ranks_of, (2, 4), PROFILES, names):
        if time.monotonic() > ends:
            break
        cases.append(beside_public(public, name, ranks, factor * ranks, times))
    shorter = sum(case["step"] < case["public_step"] * (1 - 1e-6) for case in cases)
    print(f"{len(cases)} cases, {sum(map(lost, cases))} of them lost; ours shorter in {shorter}")
    return [case for case in cases if lost(case)]


def main() -> int:
    parser = parser_of(__doc__, ("classes", "orders"))
    parser.add_argument("--ranks", type=int, nargs="+", help="4 8 16 32, for orders 4 8 16")
    parser.add_argument("--times", type=float, nargs=3, default=[1.0, 1.0, 1.0], metavar=("F", "I", "W"))
    parser.add_argument("--transfer", type=float, default=0.0)
    parser.add_argument("--clone", type=Path, help="for orders; without it they are left out")
    parser.add_argument("--only", nargs="+", default=list(PUBLIC), choices=list(PUBLIC), help="of orders")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further order is begun")
    given = parser.parse_args()
    how = Cost(tuple(given.times), given.transfer)
    parts = {
        "classes": lambda: classes(given.ranks or [4, 8, 16, 32], how),
        "orders": lambda: orders(given.clone, given.ranks or [4, 8, 16], given.only, given.minutes),
    }
    return run_parts([name for name in given.parts if name != "orders" or given.clone], parts)


if __name__ == "__main__":
    sys.exit(main())
