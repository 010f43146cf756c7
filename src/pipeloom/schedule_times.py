"""What micro-batches, messages and copies take, for schedules without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from .ir import json_codec
from .ir.costs import StageCost
from .ir.errors import ConfigError, ScheduleError
from .ir.flow import dag, flow_of
from .ir.graph import Value
from .ir.plan import Plan, load_plan
from .ir.profile import Profile
from .ir.stages import StageGraph
from .schedules import registry

Edges = tuple[tuple[int, int], ...]
"""(from stage, to stage) of each message."""


def graph_of_edges(edges: Edges) -> StageGraph:
    """The stages that edges name, which are numbered from 0 without gaps, with one message per edge.

    Raises: ScheduleError if a number is missing, an edge stands twice, or stages wait in a circle.

    >>> graph_of_edges(((0, 1), (1, 4), (2, 3), (3, 4))).predecessors[4]
    (1, 3)
    """
    named = {stage for edge in edges for stage in edge}
    if gaps := sorted(set(range(max(named) + 1)) - named):
        raise ScheduleError(
            f"no edge names stage {gaps[0]}", hint="number the stages from 0 without gaps, each in an edge"
        )
    if twice := [edge for edge in dict.fromkeys(edges) if edges.count(edge) > 1]:
        source, target = twice[0]
        raise ScheduleError(f"the edge {source}-{target} is given twice", hint="give each edge once")
    count = len(named)
    ends = named - {source for source, _ in edges} or named
    graph = dag(count, edges, loss_stage=max(ends))
    flow_of(graph)  # refuses a circle
    return graph


def placed(name: str, edges: Edges) -> tuple[StageGraph, tuple[int, ...]]:
    """The graph and a placement for a schedule of the library: each stage on the rank of its number.

    Raises: ScheduleError if the schedule has several stages on a rank, or brings its own stages.
    """
    place = registry.entry(name).place
    if place == "table":
        raise ScheduleError(
            f"{name} has stages of its own, --edges gives it others",
            hint="leave --edges out; a file of rows is held against edges by `pipeloom schedule check`",
        )
    if place != "line":
        raise ScheduleError(
            f"{name} runs several stages on each rank, --edges gives each stage a rank of its own",
            hint="use a schedule with one stage per rank, as 1f1b or zb_h1; `check` reads rows of any "
            "placement for a graph",
        )
    graph = graph_of_edges(edges)
    return graph, tuple(range(len(graph.stages)))


def between(stages: StageGraph) -> list[tuple[int, int]]:
    """The edges of the first replica, as they were given; a chain's from front to back."""
    return list(dict.fromkeys((stages.origin(c.source), stages.origin(c.target)) for c in stages.crossings))


def seconds_by_edge(stages: StageGraph, transfer_s: Sequence[float]) -> dict[tuple[int, int], float]:
    """(stage, stage), in both directions -> seconds of a message between them, replicas and shards too."""
    first = dict(zip(between(stages), transfer_s, strict=True))
    given = {
        (c.source, c.target): first[stages.origin(c.source), stages.origin(c.target)]
        for c in stages.crossings
    }
    return given | {(target, source): seconds for (source, target), seconds in given.items()}


Seconds: TypeAlias = float | tuple[float, ...]
"""One number: of one micro-batch on all stages of a rank together. Several: on pieces of the model from front
to back, one per stage, or fewer, each then cut into the same number of equal stages."""

UNIT = 1 << 44
"""Bytes that the residuals of one micro-batch take on a rank where nothing is known: large, so that
messages, whose sizes stand for their times, are nothing against it."""

LONGEST = 1 << 24
"""Bytes of the message that takes longest; the others are in proportion."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchTimes:
    """What one micro-batch takes. residual_bytes: per piece of the model, if known."""

    forward_s: Seconds = 1.0
    input_grad_s: Seconds = 1.0
    weight_grad_s: Seconds = 1.0
    residual_bytes: tuple[float, ...] = ()


def load_work(path: Path, ranks: int) -> MicrobatchTimes:
    """Times of a saved plan, stage by stage; or of a saved profile, spread evenly over the ranks.

    Raises: ConfigError if the file is missing or is neither.
    """
    try:
        plan = load_plan(path)
    except ConfigError as no_plan:
        try:
            profile = json_codec.load(path, Profile)
        except ConfigError:
            if "valid" not in no_plan.message:
                raise no_plan from None
            raise ConfigError(
                f"{path} is neither a plan nor a profile of pipeloom",
                hint="write one with `pipeloom plan MODEL -o FILE` or `pipeloom profile MODEL --save FILE`",
            ) from None
        costs = profile.costs.values()
        return MicrobatchTimes(
            forward_s=sum(c.forward_s for c in costs) / ranks,
            input_grad_s=sum(c.input_grad_s for c in costs) / ranks,
            weight_grad_s=sum(c.weight_grad_s for c in costs) / ranks,
        )
    return _work_of_plan(plan)


def _work_of_plan(plan: Plan) -> MicrobatchTimes:
    in_flight = registry.in_flight(plan.as_schedule)
    residuals = [s.memory.residuals / max(count, 1) for s, count in zip(plan.stages, in_flight, strict=False)]
    return MicrobatchTimes(
        forward_s=tuple(s.forward_s for s in plan.stages),
        input_grad_s=tuple(s.input_grad_s for s in plan.stages),
        weight_grad_s=tuple(s.weight_grad_s for s in plan.stages),
        residual_bytes=tuple(residuals) if any(residuals) else (),
    )


def stage_costs(
    times: MicrobatchTimes, stages: int, ranks: float, *, slices: int = 1
) -> tuple[StageCost, ...]:
    """One cost per stage, for an action on one of the `slices` of a micro-batch.

    Residuals are held until W: what I frees is not known without a model.

    Raises: ConfigError if the numbers of a list do not fit the stages.

    >>> [c.forward_s for c in stage_costs(MicrobatchTimes(forward_s=(1.0, 3.0)), 4, 2)]
    [0.5, 0.5, 1.5, 1.5]
    """
    f, i, w = (
        per_stage(seconds, stages, ranks, name)
        for seconds, name in (
            (times.forward_s, "F"),
            (times.input_grad_s, "I"),
            (times.weight_grad_s, "W"),
        )
    )
    held_bytes = per_stage(times.residual_bytes or float(UNIT), stages, ranks, "residuals")
    return tuple(
        StageCost(
            forward_s=f[s] / slices,
            input_grad_s=i[s] / slices,
            weight_grad_s=w[s] / slices,
            backward_s=(i[s] + w[s]) / slices,
            residual_bytes=round(held_bytes[s] / slices),
            carried_bytes=round(held_bytes[s] / slices),
        )
        for s in range(stages)
    )


def per_stage(amount: Seconds, stages: int, ranks: float, name: str) -> list[float]:
    """The part of each stage. Raises: ConfigError if a list does not fit."""
    if not isinstance(amount, tuple):
        return [amount * ranks / stages] * stages
    if len(amount) > stages or stages % len(amount):
        raise ConfigError(
            f"{name} has {len(amount)} times for {stages} stages",
            hint=f"give one time for all ranks, or one per stage: {stages}, or a number that divides it",
        )
    share = len(amount) / stages
    return [amount[s * len(amount) // stages] * share for s in range(stages)]


def with_transfers(stages: StageGraph, transfer_s: tuple[float, ...]) -> tuple[StageGraph, float]:
    """Stages with `transfer_s[i]` seconds along the i-th edge and back: in a chain from stage i to i + 1.

    Returns: the stages with messages of fitting sizes, and the bandwidth in bytes per second.
    Raises: ConfigError unless there is one time per boundary.
    """
    count = len(between(stages))
    if len(transfer_s) != count:
        raise ConfigError(
            f"-T has {len(transfer_s)} times for the {count} boundaries between {stages.cuts} stages",
            hint="give one time for all messages, or one per boundary",
        )
    longest_s = max(transfer_s, default=0.0)
    if longest_s == 0:
        return stages, float("inf")

    seconds = seconds_by_edge(stages, transfer_s)

    def sized(value: Value, edge: tuple[int, int]) -> Value:
        return replace(value, shape=(round(LONGEST * seconds[edge] / longest_s / 4),))

    crossings = tuple(replace(c, value=sized(c.value, (c.source, c.target))) for c in stages.crossings)
    return replace(stages, crossings=crossings), LONGEST / longest_s
