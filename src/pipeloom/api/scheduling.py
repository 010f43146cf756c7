"""Schedules by themselves, without a model: build, lower, simulate and explain them for given times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import schedules
from ..ir.cluster import Cluster, Device, Link
from ..ir.costs import StageCost, equal_costs
from ..ir.schedule import Program, Schedule
from ..ir.stages import StageGraph, chain
from ..ir.timeline import Timeline
from ..lowering import lower
from ..schedules.csv import program_text, read_schedule, schedule_text
from ..simulator import Summary, simulate, summarise

UNIT = 1 << 20
"""Bytes that the residuals of one micro-batch take on a rank, so that peaks read as micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What schedules are compared for. Times in seconds, of one micro-batch on all stages of a rank."""

    ranks: int = 4
    microbatches: int = 8
    chunks: int = 0
    forward_s: float = 1.0
    input_grad_s: float = 1.0
    weight_grad_s: float = 1.0
    transfer_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A schedule, proved and simulated. peaks: micro-batches of residuals per rank."""

    schedule: Schedule
    stages: StageGraph
    program: Program = field(repr=False)
    timeline: Timeline = field(repr=False)
    summary: Summary
    peaks: tuple[float, ...]


def library() -> dict[str, dict[str, str]]:
    """What the library holds: name -> what it is about, where its stages go, what running it lacks."""
    found = {}
    for name in schedules.names():
        entry = schedules.entry(name)
        found[name] = {"about": entry.about, "place": entry.place, "lacks": entry.lacks}
    return found


def draw_schedule(name: str, setting: Setting) -> Drawn:
    """Build a schedule of the library in its usual placement and simulate it.

    The times of a rank are shared evenly by its stages. Bidirectional schedules run half of the
    micro-batches in each direction.
    Raises: ScheduleError if it cannot be built.
    """
    stages, placement = schedules.usual(name, setting.ranks, setting.chunks)
    both = schedules.entry(name).place == "both ways"
    count = setting.microbatches // 2 if both else setting.microbatches
    costs = _costs(placement, setting, share=not both)
    times = schedules.Times(costs=costs, transfer_s=setting.transfer_s)
    made = schedules.build(name, stages, placement, max(count, 1), times=times)
    return _drawn(made, stages, costs, setting)


def draw_file(file: Path, setting: Setting) -> Drawn:
    """Read a CSV file, prove that it can run on a chain of stages, and simulate it.

    Raises: ScheduleError or DeadlockError that says what is wrong.
    """
    made = read_schedule(file)
    stages = chain(made.stages)
    return _drawn(made, stages, _costs(made.placement, setting, share=True), setting)


def _costs(placement: tuple[int, ...], setting: Setting, *, share: bool) -> tuple[StageCost, ...]:
    ranks = max(placement) + 1
    parts = len(placement) / ranks if share else 1.0
    return equal_costs(
        len(placement), forward_s=setting.forward_s / parts, input_grad_s=setting.input_grad_s / parts,
        weight_grad_s=setting.weight_grad_s / parts, residual_bytes=round(UNIT / parts),
    )  # fmt: skip


def _drawn(made: Schedule, stages: StageGraph, costs: tuple[StageCost, ...], setting: Setting) -> Drawn:
    # What I frees is not known without a model: residuals count until W.
    held = tuple(_held_until_w(c) for c in costs)
    program = lower(made, stages)
    device = Device(name="any", memory_bytes=1)
    link = Link(bandwidth_bytes_per_s=float("inf"), latency_s=setting.transfer_s)
    cluster = Cluster(devices=(device,) * made.ranks, within_node=link)
    timeline = simulate(program, stages, held, cluster)
    return Drawn(
        schedule=made, stages=stages, program=program, timeline=timeline, summary=summarise(timeline),
        peaks=tuple(peak.get("residuals", 0) / UNIT for peak in timeline.peaks),
    )  # fmt: skip


def _held_until_w(cost: StageCost) -> StageCost:
    return replace(cost, carried_bytes=cost.residual_bytes)


def csv_text(drawn: Drawn, *, transfers: bool = False) -> str:
    """A schedule in the format of torch.distributed.pipelining, with or without transfers."""
    return program_text(drawn.program) if transfers else schedule_text(drawn.schedule)


def idle_reasons(timeline: Timeline) -> Mapping[str, float]:
    """Rank-seconds of idle time by reason, largest first.

    "start" and "end" are before a rank's first and after its last action; any other idle time is put down
    to the action that ended it: "before I on rank 2" waits for what that action needs.
    """
    found: dict[str, float] = defaultdict(float)
    by_rank: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for e in timeline.events:
        if e.stream == "compute" and e.duration_s > 0:
            by_rank[e.rank].append((e.start_s, e.end_s, e.action))
    for rank, row in by_rank.items():
        row.sort()
        found["start: the first data is not there yet"] += row[0][0]
        found["end: other ranks still work"] += timeline.step_s - row[-1][1]
        for (_, end, _), (start, _, action) in zip(row, row[1:], strict=False):
            if start > end + 1e-9:
                kind = action.lstrip("0123456789").rstrip("0123456789")
                found[f"rank {rank} waits to run {kind}"] += start - end
    return dict(sorted(((k, v) for k, v in found.items() if v > 1e-9), key=lambda item: -item[1]))
