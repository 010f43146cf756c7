"""Schedules of the library beside those of others, timed by our simulator.

    python bench/schedules.py [--ranks 4 8 16 32]

PyPI's zbpp-light and torch.distributed.pipelining's own classes, on the same ranks, micro-batches and times
(F = I = W = 1, no transfers): seconds to generate (and those of the processor alone), to check and lower, and
to simulate; makespan and peak. No process group is needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

from machine import parser_of, run_parts
from torch.distributed.pipelining import schedules as theirs

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.schedule import Schedule
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate

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


def measure(who: str, generate: Callable[[], Rows], shape: dict[str, Any]) -> dict[str, Any]:
    """One line of the result."""
    started, worked = time.perf_counter(), time.process_time()
    rows = generate()
    generated, busy = time.perf_counter(), time.process_time()
    stages, placement = shape["stages"], shape["placement"]
    made = Schedule(name=who, microbatches=shape["m"], placement=placement, rows=rows)
    program = lower(made, stages)
    lowered = time.perf_counter()
    device = Device(name="any", memory_bytes=1)
    link = Link(bandwidth_bytes_per_s=float("inf"))
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


def shape_of(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """The stages of our schedule `name`, with a rank's F, I and W of 1 each shared evenly by its stages."""
    stages, placement = registry.default_placement(name, ranks)
    parts = len(placement) / ranks
    size = round(UNIT / parts)
    equal = equal_costs(
        len(placement),
        forward_s=1 / parts,
        input_grad_s=1 / parts,
        weight_grad_s=1 / parts,
        residual_bytes=size,
    )
    costs = tuple(replace(cost, carried_bytes=size) for cost in equal)
    return {"stages": stages, "placement": placement, "costs": costs, "m": microbatches}


def ours(name: str, shape: dict[str, Any]) -> Callable[[], Rows]:
    where = shape["stages"], shape["placement"], shape["m"]
    return lambda: registry.build(name, *where, costs=shape["costs"]).rows


def classes(ranks_of: list[int]) -> list[dict[str, Any]]:
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
            lines.append(measure(who, generate, shape_of(own, ranks, m)))
        for own in (*(own for _, own, _ in rivals), *ALONE):
            shape = shape_of(own, ranks, m)
            lines.append(measure(f"pipeloom {own}", ours(own, shape), shape))
    return lines


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32])
    return run_parts(["classes"], {"classes": partial(classes, parser.parse_args().ranks)})


if __name__ == "__main__":
    sys.exit(main())
