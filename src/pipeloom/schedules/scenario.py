"""Schedules without a model: what micro-batches, messages and copies take, and the step that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from ..checks.schedules import check
from ..checks.updates import UpdateProof, prove_updates
from ..checks.weight_versions import StageVersions, use_made_weights, versions, weight_versions
from ..ir.cluster import Cluster, Device, Link
from ..ir.costs import StageCost
from ..ir.errors import ConfigError, ScheduleError
from ..ir.explanation import Explanation
from ..ir.flow import dag, flow_of
from ..ir.plan import load_plan
from ..ir.profile import Profile
from ..ir.schedule import Program, Schedule
from ..ir.stages import StageGraph, chain, replicate
from ..ir.text import format_bytes, load_noun, parse_bytes, show_microbatches
from ..ir.timeline import Timeline
from ..ir.weight_policies import Updates
from ..lowering.passes import lower
from ..simulator.idle_time.explain import explain_idle_time
from ..simulator.idle_time.wait_causes import Causes
from ..simulator.memory_limit import check_memory_limit
from ..simulator.simulate import simulate
from ..simulator.summary import Summary, summarise
from . import registry
from .formats import program_text, read_schedule, schedule_text
from .language import uplinks
from .language.names import ALIASES, load_operations, parse_name

Edges = tuple[tuple[int, int], ...]
"""(from stage, to stage) of each message."""


def graph_of_edges(edges: Edges) -> StageGraph:
    """The stages that edges name, which are numbered from 0 without gaps, with one message per edge.

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
    """The graph and a placement for a schedule of the library: each stage on the rank of its number."""
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
    edges = between(stages)
    if len(transfer_s) != len(edges):
        raise ConfigError(
            f"-T has {len(transfer_s)} times for the {len(edges)} boundaries between {stages.cuts} stages",
            hint="give one time for all messages, or one per boundary",
        )
    first = dict(zip(edges, transfer_s, strict=True))
    given = {
        (c.source, c.target): first[stages.origin(c.source), stages.origin(c.target)]
        for c in stages.crossings
    }
    return given | {(target, source): seconds for (source, target), seconds in given.items()}


Seconds: TypeAlias = float | tuple[float, ...]
"""One number: of one micro-batch on all stages of a rank together. Several: per stage from front to back, or
per piece of the model, each then cut into the same number of equal stages."""

UNIT = 1 << 44
"""Bytes of one micro-batch's residuals on a rank where nothing is known: messages, whose sizes stand for
their times, are nothing against it."""

LONGEST = 1 << 24


@dataclass(frozen=True, kw_only=True)
class MicrobatchTimes:
    """What one micro-batch takes. residual_bytes: per piece of the model, if known."""

    forward_s: Seconds = 1.0
    input_grad_s: Seconds = 1.0
    weight_grad_s: Seconds = 1.0
    residual_bytes: tuple[float, ...] = ()


def load_work(path: Path) -> MicrobatchTimes:
    """Times of a saved plan, stage by stage; or of a saved profile, for stages that are equal parts of it."""
    try:
        plan = load_plan(path)
    except ConfigError as no_plan:
        if "valid" not in no_plan.message:
            raise
        try:
            costs = load_noun(path, Profile).costs.values()
        except ConfigError:
            raise ConfigError(
                f"{path} is neither a plan nor a profile of pipeloom",
                hint="write one with `pipeloom plan MODEL -o FILE` or `pipeloom profile MODEL --save FILE`",
            ) from None
        names = ("forward_s", "input_grad_s", "weight_grad_s")
        return MicrobatchTimes(**{name: (sum(getattr(c, name) for c in costs),) for name in names})
    in_flight = registry.in_flight(plan.as_schedule)
    # Without the plan's copies a micro-batch keeps what it offloads; what it recomputes it still recomputes.
    residuals = [
        max(s.memory.residuals / max(count, 1), s.kept_bytes + s.offloaded_bytes)
        for s, count in zip(plan.stages, in_flight, strict=False)
    ]
    return MicrobatchTimes(
        forward_s=tuple(s.forward_s for s in plan.stages),
        input_grad_s=tuple(s.input_grad_s + s.recompute_s for s in plan.stages),
        weight_grad_s=tuple(s.weight_grad_s for s in plan.stages),
        residual_bytes=tuple(residuals) if any(residuals) else (),
    )


def stage_costs(
    times: MicrobatchTimes, stages: int, ranks: float, *, slices: int = 1
) -> tuple[StageCost, ...]:
    """One cost per stage, for an action on one of the `slices` of a micro-batch. Residuals are held until W:
    what I frees is not known without a model.

    >>> [c.forward_s for c in stage_costs(MicrobatchTimes(forward_s=(1.0, 3.0)), 4, 2)]
    [0.5, 0.5, 1.5, 1.5]
    """
    columns = (
        per_stage(times.forward_s, stages, ranks, "F"),
        per_stage(times.input_grad_s, stages, ranks, "I"),
        per_stage(times.weight_grad_s, stages, ranks, "W"),
        per_stage(times.residual_bytes or float(UNIT), stages, ranks, "residuals"),
    )
    return tuple(
        StageCost(
            forward_s=f / slices,
            input_grad_s=i / slices,
            weight_grad_s=w / slices,
            backward_s=(i + w) / slices,
            residual_bytes=round(size / slices),
            carried_bytes=round(size / slices),
        )
        for f, i, w, size in zip(*columns, strict=True)
    )


def per_stage(amount: Seconds, stages: int, ranks: float, name: str) -> list[float]:
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
    """Stages with `transfer_s[i]` seconds along the i-th edge and back, by messages of fitting sizes; and the
    bandwidth in bytes per second."""
    seconds, longest_s = seconds_by_edge(stages, transfer_s), max(transfer_s, default=0.0)
    if longest_s == 0:
        return stages, inf
    crossings = []
    for crossing in stages.crossings:
        size = LONGEST * seconds[crossing.source, crossing.target] / longest_s
        crossings.append(replace(crossing, value=replace(crossing.value, shape=(round(size / 4),))))
    return replace(stages, crossings=tuple(crossings)), LONGEST / longest_s


SLICES = 2

MOST_FORWARDS = 1 << 24
"""Of a step that is simulated: more take minutes, and more memory than most machines have."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What schedules are simulated for.

    edges: of a graph of stages, each on the rank of its number; instead of `ranks` and `chunks`.
    microbatches: of both directions together, each whole.  chunks: stages per rank, 0 for as many as usual.
    transfer_s: seconds of a message between ranks; or per boundary of two stages, with edges per edge.
    per_node: ranks of a node; messages between nodes share one link out of each and one into it. 0: only
    those from one rank to the same other share one.
    memory: most residuals of a rank: micro-batches, or bytes with a unit if the file says sizes.
    pair_factor: what a pair of actions takes of the sum of their times.
    copy_ratio: k, what OFFLOAD and RELOAD of a stage together take of the time of its F, I and W.
    per_uplink: neighbouring ranks that share an uplink to the host, as fast as the link of each.
    shortest: what a schedule with several variants has the least of, "step" or "span" (of a rank).
    """

    ranks: int = 4
    microbatches: int = 8
    chunks: int = 0
    times: MicrobatchTimes = MicrobatchTimes()
    transfer_s: float | tuple[float, ...] = 0.0
    per_node: int = 0
    memory: str = ""
    pair_factor: float = 1.0
    edges: Edges = ()
    copy_ratio: float = uplinks.USUAL_K
    per_uplink: int = 1
    shortest: str = "step"


@dataclass(frozen=True, kw_only=True)
class SimulatedSchedule:
    """A schedule, proved and simulated. peaks: per rank the most residuals at once, in micro-batches of
    its own stages; peaks_bytes: the same, empty where sizes are not known."""

    schedule: Schedule
    stages: StageGraph
    microbatches: int
    program: Program = field(repr=False)
    cluster: Cluster = field(repr=False)
    costs: tuple[StageCost, ...] = field(repr=False)
    timeline: Timeline = field(repr=False)
    summary: Summary
    peaks: tuple[float, ...]
    peaks_bytes: tuple[int, ...] = ()

    @property
    def peak(self) -> float:
        return max(self.peaks, default=0.0)

    def figures(self) -> dict[str, Any]:
        """Times, shares of rank-time, and residuals in micro-batches and bytes; peak_bytes: None where sizes
        are not known."""
        keys = ("step_s", "bubble", "span_s", "span_bubble")
        figures = {key: getattr(self.summary, key) for key in keys}
        return figures | {"peak": self.peak, "peak_bytes": max(self.peaks_bytes, default=None)}

    def by_rank(self) -> list[dict[str, Any]]:
        step_s = self.summary.step_s
        return [
            {
                "rank": r.rank,
                "busy_s": r.busy_s,
                "bubble": 1 - r.busy_s / step_s if step_s else 0.0,
                "peak": self.peaks[r.rank],
            }
            for r in self.summary.ranks
        ]


def library() -> dict[str, dict[str, str | tuple[str, ...]]]:
    return {
        name: {"about": e.about, "place": e.place, "lacks": e.lacks, "aliases": ALIASES.get(name, ())}
        for name, e in ((name, registry.entry(name)) for name in registry.names())
    }


def simulate_schedule(name: str, scenario: Scenario) -> SimulatedSchedule:
    """Build a schedule of the library as `build_schedule` does, and simulate it.

    Raises: ScheduleError if it cannot be built or does not keep to the memory; ConfigError for wrong times.
    """
    try:
        return _simulate(*build_schedule(name, scenario), scenario)
    except ScheduleError as error:
        if not scenario.memory:
            raise
        free = simulate_schedule(name, replace(scenario, memory=""))
        raise ScheduleError(
            f"{name} does not keep to --memory {scenario.memory}: {error.message}",
            hint=f"without a limit a rank of it holds up to {free.peak:.4g} micro-batches",
        ) from None


def build_schedule(name: str, scenario: Scenario) -> tuple[Schedule, StageGraph, tuple[StageCost, ...]]:
    """A schedule of the library in its usual placement, or on the graph of `edges`; with its stages, and what
    an action of each takes. Bidirectional schedules run half of the micro-batches in each direction; in
    sliced ones each action has its share of a micro-batch.

    Raises: ScheduleError if it cannot be built; ConfigError for wrong times.
    """
    if scenario.edges:
        stages, placement = placed(name, scenario.edges)
    else:
        stages, placement = registry.default_placement(name, scenario.ranks, scenario.chunks)
    _refuse_misfit(name, stages, scenario)
    slices = _slices(name)
    if len(placement) * scenario.microbatches * slices > MOST_FORWARDS:
        raise ConfigError(
            f"{scenario.microbatches} micro-batches on {len(placement)} stages are too many to simulate",
            hint=f"give at most {MOST_FORWARDS // (len(placement) * slices)} micro-batches",
        )
    costs = _costs(scenario, stages, len(placement) if scenario.edges else scenario.ranks, slices)
    caps = _caps(scenario, _units(costs, placement, stages.replicas, slices))
    transfer_s = scenario.transfer_s
    seconds = seconds_by_edge(stages, transfer_s) if isinstance(transfer_s, tuple) else {}

    def between_stages(source: int, target: int) -> float:
        return seconds[source, target]

    schedule = registry.build(
        name,
        stages,
        placement,
        scenario.microbatches // stages.replicas * slices,
        costs=costs,
        limit_bytes=tuple(caps) if scenario.memory else None,
        transfer_s=between_stages if isinstance(transfer_s, tuple) else transfer_s,
        uplinks=uplinks.shared_uplinks(costs, max(placement) + 1, scenario.per_uplink),
        shortest=scenario.shortest,
    )
    return schedule, stages, costs


def simulate_file(
    file: Path, scenario: Scenario, *, replicas: int = 1, operations: Path | None = None
) -> SimulatedSchedule:
    """Read a file of rows, prove that it can run, and simulate it.

    replicas: 2 if the second half of the stages is a replica of the first.  operations: a Python file that
    declares what else the rows have.
    Raises: ScheduleError if it cannot be read, or breaks a rule; ConfigError for wrong times.
    """
    if operations is not None:
        load_operations(operations)
    return simulate_rows(read_schedule(file), scenario, replicas=replicas)


def simulate_rows(schedule: Schedule, scenario: Scenario, *, replicas: int = 1) -> SimulatedSchedule:
    """Prove that the rows of a schedule can run, and simulate them. Raises: as `simulate_file`."""
    file = schedule.name
    if schedule.stages % replicas:
        raise ScheduleError(
            f"{file} has {schedule.stages} stages, which {replicas} replicas do not share evenly",
            hint="leave --replicas out, or give as many stages in each",
        )
    count = schedule.stages // replicas
    one = graph_of_edges(scenario.edges) if scenario.edges else chain(count)
    if len(one.stages) != count:
        raise ScheduleError(
            f"{file} has {count} stages, --edges names {len(one.stages)}",
            hint="name each stage of the file in an edge, numbered from 0",
        )
    stages = replicate(one, replicas) if replicas > 1 else one
    try:
        check(schedule, stages)
    except ScheduleError as error:
        if replicas > 1 or scenario.edges or count % 2:
            raise
        try:
            check(schedule, replicate(chain(count // 2), 2))
        except ScheduleError:
            raise error from None
        hint = f"{error.hint}; or add --replicas 2, if the second half of the stages is a replica"
        raise type(error)(error.message, hint=hint) from None
    return _simulate(schedule, stages, _costs(scenario, stages, schedule.ranks, schedule.slices), scenario)


def updates_of(name: str) -> Updates:
    return Updates(policy=registry.entry(name).weights)


def weights(simulated: SimulatedSchedule, updates: Updates) -> tuple[StageVersions, ...]:
    schedule = simulated.schedule
    if updates.rule.flushes:
        return ()
    if not schedule.columns.trains:
        raise ScheduleError(f"{schedule.name} has no backwards, so nothing updates its weights")
    weight_versions(schedule, simulated.stages, updates)
    if not use_made_weights(schedule, updates):
        raise ScheduleError(
            f"with so few updates every micro-batch of {schedule.name} uses the first weights, which says "
            f"nothing of {updates.policy}",
            hint=f"give it {show_microbatches(3 * updates.every)} or more",
        )
    return versions(schedule, updates)


def prove(simulated: SimulatedSchedule, updates: Updates) -> UpdateProof | None:
    """That each update takes every gradient once, with one parameter for each stage that replicas and shards
    share; None for a schedule without backwards. Raises: ScheduleError."""
    schedule, stages = simulated.schedule, simulated.stages
    if not schedule.columns.trains:
        return None
    count = len(stages.stages)
    stages = replace(stages, params=tuple((f"stage {stages.origin(s)}",) for s in range(count)))
    several = None
    if not updates.rule.flushes:  # slices of a micro-batch are numbered apart
        several = replace(updates, every=updates.every * schedule.slices)
    return prove_updates(lower(schedule, stages, updates=several), stages, updates=several)


def explain(simulated: SimulatedSchedule) -> Explanation:
    return explain_idle_time(simulated.program, simulated.timeline, simulated.stages, simulated.cluster)


def causes_of(simulated: SimulatedSchedule) -> Causes:
    return Causes(simulated.program, simulated.timeline, simulated.stages, simulated.cluster)


def csv_text(simulated: SimulatedSchedule, *, transfers: bool = False) -> str:
    return program_text(simulated.program) if transfers else schedule_text(simulated.schedule)


def _refuse_misfit(name: str, stages: StageGraph, scenario: Scenario) -> None:
    if scenario.memory and "memory" in parse_name(name).options:
        raise ConfigError(
            f"{name} limits what a rank holds, and so does --memory {scenario.memory}",
            hint="leave one of them out",
        )
    if stages.replicas > 1 and scenario.chunks > 1:
        raise ScheduleError(
            f"{name} runs one stage per rank in each direction, not {scenario.chunks}",
            hint="leave -v out, or use dualpipev or hanayo",
        )
    if scenario.microbatches % stages.replicas:
        raise ScheduleError(
            f"{name} runs half of the micro-batches in each direction, and {scenario.microbatches} is odd",
            hint="give an even number of micro-batches",
        )


def _slices(name: str) -> int:
    if registry.entry(name).lacks != "sequence slices":
        return 1
    count = parse_name(name).options.get("slices", SLICES)
    if count < 1 or count != int(count):
        raise ScheduleError(
            f"{name}: a micro-batch has {count:g} slices", hint="give a whole number from 1 on"
        )
    return int(count)


def _costs(scenario: Scenario, stages: StageGraph, ranks: int, slices: int) -> tuple[StageCost, ...]:
    """Costs of an action of each stage; those of a replica or a shard are its origin's."""
    share = stages.cuts * stages.replicas / len(stages.stages)  # below 1 if stages span several ranks
    costs = stage_costs(scenario.times, stages.cuts, ranks * share, slices=slices)
    each = [costs[stages.origin(s)] for s in range(len(stages.stages))]
    copied = uplinks.with_copies(each, scenario.copy_ratio)
    return tuple(replace(cost, pair_factor=scenario.pair_factor) for cost in copied)


def _units(
    costs: tuple[StageCost, ...], placement: tuple[int, ...], replicas: int, slices: int
) -> list[float]:
    """Per rank the bytes of one micro-batch."""
    units = [0.0] * (max(placement) + 1)
    for cost, rank in zip(costs, placement, strict=True):
        units[rank] += cost.residual_bytes * slices / replicas
    return units


def _caps(scenario: Scenario, units: list[float]) -> list[float]:
    """Most bytes of residuals per rank; infinite without a limit.  units: bytes of one micro-batch."""
    text = scenario.memory
    if not text:
        return [inf] * len(units)
    try:
        count = float(text)
    except ValueError:
        try:
            size = parse_bytes(text)
        except ConfigError:
            raise ConfigError(
                f"cannot read --memory {text!r}", hint="write micro-batches, as 2.5, or a size, as 3GiB"
            ) from None
        if not scenario.times.residual_bytes:
            raise ConfigError(
                f"--memory {text}: what residuals take is not known without a plan",
                hint="give a number of micro-batches, as in --memory 4, or --times PLAN",
            ) from None
        return [float(size)] * len(units)
    if not 0 < count < inf:
        raise ConfigError(f"--memory is {text}", hint="give a number of micro-batches above 0")
    return [count * unit for unit in units]


def _simulate(
    schedule: Schedule, stages: StageGraph, costs: tuple[StageCost, ...], scenario: Scenario
) -> SimulatedSchedule:
    sized = bool(scenario.times.residual_bytes)
    units = _units(costs, schedule.placement, stages.replicas, schedule.slices)
    caps = _caps(scenario, units)
    if scenario.memory:
        check(schedule, stages)
        one = max(units)
        show = format_bytes if sized else (lambda size: f"{size / one:g} micro-batches")
        check_memory_limit(schedule, stages, costs, caps, show=show)
    joined, cluster = wired(stages, schedule.ranks, scenario, costs)
    program = lower(schedule, joined)
    timeline = simulate(program, joined, costs, cluster)
    residual_peaks = timeline.residual_peaks  # not those when all is highest: messages may be long
    return SimulatedSchedule(
        schedule=schedule,
        stages=joined,
        microbatches=schedule.microbatches * stages.replicas // schedule.slices,
        program=program,
        cluster=cluster,
        costs=costs,
        timeline=timeline,
        summary=summarise(timeline),
        peaks=tuple(size / unit if unit else 0.0 for size, unit in zip(residual_peaks, units, strict=True)),
        peaks_bytes=residual_peaks if sized else (),
    )


def wired(
    stages: StageGraph, ranks: int, scenario: Scenario, costs: tuple[StageCost, ...]
) -> tuple[StageGraph, Cluster]:
    """Stages with messages, and links and uplinks on which these and copies take the times that are given."""
    times, shared = scenario.transfer_s, None
    link = Link(bandwidth_bytes_per_s=inf)
    if scenario.per_node and isinstance(times, float):
        times = (times,) * len(between(stages))
    if isinstance(times, tuple):
        stages, bandwidth = with_transfers(stages, times)
        link = Link(bandwidth_bytes_per_s=bandwidth)
        shared = link if scenario.per_node else None
    elif times:
        link = Link(bandwidth_bytes_per_s=inf, latency_s=times)
    size = scenario.per_node or ranks
    devices = tuple(Device(name="any", memory_bytes=1, node=rank // size) for rank in range(ranks))
    switches: dict[str, Link] = {}
    copied = next((cost for cost in costs if cost.offload_s), None)
    if scenario.per_uplink > 1 and copied is not None:
        if size < ranks and size % scenario.per_uplink:
            raise ConfigError(
                f"with --per-uplink {scenario.per_uplink} and --per-node {size} ranks of two nodes share "
                "an uplink",
                hint="let --per-node be a multiple of --per-uplink",
            )
        uplink = Link(bandwidth_bytes_per_s=copied.offloaded_bytes / copied.offload_s)
        names = [f"uplink {rank // scenario.per_uplink}" for rank in range(ranks)]
        switches = dict.fromkeys(names, uplink)
        devices = tuple(
            replace(device, switch=name, host_link=uplink)
            for device, name in zip(devices, names, strict=True)
        )
    return stages, Cluster(devices=devices, within_node=link, node_link=shared, switches=switches)
