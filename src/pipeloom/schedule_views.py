"""Schedules listed, compared, explained, checked and tuned, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf
from pathlib import Path

from .checks.schedules import check
from .checks.weight_versions import StageVersions, versions, weight_versions
from .ir.action import Action, parse_action
from .ir.cluster import Cluster, Device, Link
from .ir.costs import StageCost
from .ir.dependencies import name_of, needs
from .ir.errors import ConfigError, ScheduleError
from .ir.explanation import Explanation
from .ir.flow import flow_of
from .ir.schedule import Program, Schedule
from .ir.stages import StageGraph, chain, replicate
from .ir.timeline import Event, Timeline
from .ir.units import format_bytes, parse_bytes
from .ir.weight_policy import Updates
from .lowering.passes import lower
from .schedule_times import (
    Edges,
    MicrobatchTimes,
    between,
    graph_of_edges,
    load_work,
    placed,
    seconds_by_edge,
    stage_costs,
    with_transfers,
)
from .schedules import aliases, registry
from .schedules.copies import asked, uplinks
from .schedules.formats.csv import program_text, read_schedule, schedule_text
from .schedules.language.user_files import load_file
from .simulator.idle_time.explain import explain_idle_time
from .simulator.memory_limit import check_memory_limit
from .simulator.simulate import simulate
from .simulator.summary import Summary, summarise

SLICES = 2
"""Slices of a micro-batch in sliced schedules, unless the option `slices` says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What schedules are simulated for.

    edges: of a graph of stages, each on the rank of its number; instead of `ranks` and `chunks`.
    microbatches: of a step, of both directions together, each whole.  chunks: stages per rank, 0 for as many
    as the schedule usually has.  times: of a micro-batch; or a file that says them.
    transfer_s: seconds of a message between ranks; or per boundary of two stages, with edges per edge.
    per_node: ranks of a node; messages between nodes share one link out of each and one into it, and keep it
    for as long as they take. 0: every message has a link of its own.
    memory: most residuals that a rank may hold: micro-batches, or bytes with a unit if the file says sizes.
    pair_factor: what a pair of actions takes of the sum of their times.
    copy_ratio: k, what OFFLOAD and RELOAD of a stage's residuals together take of the time of its F, I and W.
    per_uplink: neighbouring ranks that share an uplink to the host, as fast in either direction as the link
    of each of them.
    shortest: what a schedule with several variants is to have the least of, "step" or "span": from a rank's
    first action to its last.
    """

    ranks: int = 4
    microbatches: int = 8
    chunks: int = 0
    times: MicrobatchTimes | Path = MicrobatchTimes()
    transfer_s: float | tuple[float, ...] = 0.0
    per_node: int = 0
    memory: str = ""
    pair_factor: float = 1.0
    edges: Edges = ()
    copy_ratio: float = uplinks.USUAL_K
    per_uplink: int = 1
    shortest: str = "step"

    def load_times(self, ranks: int) -> MicrobatchTimes:
        return load_work(self.times, ranks) if isinstance(self.times, Path) else self.times


@dataclass(frozen=True, kw_only=True)
class SimulatedSchedule:
    """A schedule, proved and simulated.

    microbatches: of the step.  peaks: per rank, the most residuals that it holds at once, in micro-batches
    of its own stages; peaks_bytes: the same in bytes, empty where sizes are not known.
    """

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


def library() -> dict[str, dict[str, str | tuple[str, ...]]]:
    """What the library holds: name -> what it is about, where its stages go, what running it lacks, and under
    which other names it is known."""
    entries: dict[str, dict[str, str | tuple[str, ...]]] = {}
    for name in registry.names():
        entry = registry.entry(name)
        entries[name] = {
            "about": entry.about,
            "place": entry.place,
            "lacks": entry.lacks,
            "aliases": aliases.ALIASES.get(name, ()),
        }
    return entries


def simulate_schedule(name: str, scenario: Scenario) -> SimulatedSchedule:
    """Build a schedule of the library in its usual placement, or on the graph of `edges`, and simulate it.

    Bidirectional schedules run half of the micro-batches in each direction; in sliced ones each action has
    its share of a micro-batch.
    Raises: ScheduleError if it cannot be built or does not keep to the memory; ConfigError for wrong times.
    """
    if scenario.edges:
        stages, placement = placed(name, scenario.edges)
    else:
        stages, placement = registry.default_placement(name, scenario.ranks, scenario.chunks)
    _refuse_misfit(name, stages, scenario)
    slices = _slices(name)
    costs = _costs(scenario, stages, len(placement) if scenario.edges else scenario.ranks, slices)
    caps = _caps(scenario, costs, placement, stages.replicas, slices)
    transfer_s = scenario.transfer_s
    times = registry.Times(
        costs=costs,
        limit_bytes=tuple(caps) if scenario.memory else None,
        transfer_s=transfer_s if isinstance(transfer_s, float) else _by_boundary(transfer_s, stages),
        uplinks=uplinks.shared_uplinks(costs, scenario.ranks, scenario.per_uplink),
        shortest=scenario.shortest,
    )
    count = scenario.microbatches // stages.replicas * slices
    try:
        schedule = registry.build(name, stages, placement, count, times=times)
        return _simulate(schedule, stages, costs, scenario)
    except ScheduleError as error:
        if not scenario.memory:
            raise
        free = simulate_schedule(name, replace(scenario, memory=""))
        raise ScheduleError(
            f"{name} does not keep to --memory {scenario.memory}: {error.message}",
            hint=f"without a limit a rank of it holds up to {free.peak:.4g} micro-batches",
        ) from None


def simulate_file(
    file: Path, scenario: Scenario, *, replicas: int = 1, operations: Path | None = None
) -> SimulatedSchedule:
    """Read a file of rows, prove that it can run, and simulate it.

    replicas: 1 for a chain of stages; 2 if the second half of the stages is a replica of the first, which
    runs micro-batches of its own, as bidirectional schedules have it.  operations: a Python file that
    declares what else the rows have.  The stages are a chain unless the scenario has edges.
    Raises: ScheduleError or DeadlockError that says what is wrong.
    """
    if operations is not None:
        load_file(operations)
    schedule = read_schedule(file)
    if schedule.stages % replicas:
        raise ScheduleError(
            f"{file} has {schedule.stages} stages, which {replicas} replicas do not share evenly",
            hint="leave --replicas out, or give as many stages in each",
        )
    one = _stages_of_file(file, schedule.stages // replicas, scenario.edges)
    stages = replicate(one, replicas) if replicas > 1 else one
    try:
        check(schedule, stages)
    except ScheduleError as error:
        if replicas == 1 and not scenario.edges and _runs_both_ways(schedule):
            hint = f"{error.hint}; or add --replicas 2, if the second half of the stages is a replica"
            raise type(error)(error.message, hint=hint) from None
        raise
    return _simulate(schedule, stages, _costs(scenario, stages, schedule.ranks, schedule.slices), scenario)


def _stages_of_file(file: Path, count: int, edges: Edges) -> StageGraph:
    if not edges:
        return chain(count)
    graph = graph_of_edges(edges)
    if len(graph.stages) != count:
        raise ScheduleError(
            f"{file} has {count} stages, --edges names {len(graph.stages)}",
            hint="name each stage of the file in an edge, numbered from 0",
        )
    return graph


def _runs_both_ways(schedule: Schedule) -> bool:
    """Whether it can run as two replicas of a chain."""
    if schedule.stages % 2:
        return False
    try:
        check(schedule, replicate(chain(schedule.stages // 2), 2))
    except ScheduleError:
        return False
    return True


def updates_of(name: str) -> Updates:
    """How weights are updated in a schedule of the library."""
    return Updates(policy=registry.entry(name).weights)


def weights(simulated: SimulatedSchedule, updates: Updates) -> tuple[StageVersions, ...]:
    """The weight versions of each stage; empty where there is one, with `flush`.

    Raises: ScheduleError if a forward or backward does not find its version.
    """
    if updates.rule.flushes:
        return ()
    weight_versions(simulated.schedule, simulated.stages, updates)
    return versions(simulated.schedule, updates)


def explain(simulated: SimulatedSchedule) -> Explanation:
    """Why its ranks are idle, and its critical path."""
    return explain_idle_time(simulated.program, simulated.timeline, simulated.stages, simulated.cluster)


def csv_text(simulated: SimulatedSchedule, *, transfers: bool = False) -> str:
    """A schedule in the format of torch.distributed.pipelining, with or without transfers."""
    return program_text(simulated.program) if transfers else schedule_text(simulated.schedule)


def _refuse_misfit(name: str, stages: StageGraph, scenario: Scenario) -> None:
    plain, _, options = name.partition(":")
    own = [option for option in options.split(",") if option.split("=")[0] not in asked.COPY_OPTIONS]
    if registry.entry(name).family is not None and ":" in name and any(own):
        raise ScheduleError(f"{plain} has no options, {name!r} gives some", hint=f"write {plain}")
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
    """Slices of a micro-batch, each an action of its own."""
    if registry.entry(name).lacks != "sequence slices":
        return 1
    options = dict(part.split("=", 1) for part in name.partition(":")[2].split(",") if "=" in part)
    count = options.get("slices", str(SLICES))
    if not count.isdecimal() or int(count) < 1:
        raise ScheduleError(f"{name}: a micro-batch has {count} slices", hint="give a whole number from 1 on")
    return int(count)


def _costs(scenario: Scenario, stages: StageGraph, ranks: int, slices: int) -> tuple[StageCost, ...]:
    """Costs of an action of each stage; those of a replica or a shard are its origin's."""
    share = stages.cuts * stages.replicas / len(stages.stages)  # below 1 if stages span several ranks
    costs = stage_costs(scenario.load_times(ranks), stages.cuts, ranks * share, slices=slices)
    each = [costs[stages.origin(s)] for s in range(len(stages.stages))]
    copied = uplinks.with_copies(each, scenario.copy_ratio)
    return tuple(replace(cost, pair_factor=scenario.pair_factor) for cost in copied)


def _by_boundary(transfer_s: tuple[float, ...], stages: StageGraph) -> Callable[[int, int], float]:
    with_transfers(stages, transfer_s)
    seconds = seconds_by_edge(stages, transfer_s)
    return lambda source, target: seconds[source, target]


def _units(
    costs: tuple[StageCost, ...], placement: tuple[int, ...], replicas: int, slices: int
) -> list[float]:
    """Per rank the bytes of one micro-batch: the residuals of all its stages."""
    units = [0.0] * (max(placement) + 1)
    for cost, rank in zip(costs, placement, strict=True):
        units[rank] += cost.residual_bytes * slices / replicas
    return units


def _caps(
    scenario: Scenario, costs: tuple[StageCost, ...], placement: tuple[int, ...], replicas: int, slices: int
) -> list[float]:
    """Most bytes of residuals per rank; infinite without a limit."""
    units = _units(costs, placement, replicas, slices)
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
        if not isinstance(scenario.times, Path) or not scenario.load_times(len(units)).residual_bytes:
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
    shape = (schedule.placement, stages.replicas, schedule.slices)
    sized = isinstance(scenario.times, Path) and bool(scenario.load_times(schedule.ranks).residual_bytes)
    units, caps = _units(costs, *shape), _caps(scenario, costs, *shape)
    if scenario.memory:
        check(schedule, stages)
        one = max(units)
        show = format_bytes if sized else (lambda size: f"{size / one:g} micro-batches")
        check_memory_limit(schedule, stages, costs, caps, show=show)
    wired, cluster = _wired(stages, schedule.ranks, scenario, costs)
    program = lower(schedule, wired)
    timeline = simulate(program, wired, costs, cluster)
    residual_peaks = [peak.get("residuals", 0) for peak in timeline.peaks]
    return SimulatedSchedule(
        schedule=schedule,
        stages=wired,
        microbatches=schedule.microbatches * stages.replicas // schedule.slices,
        program=program,
        cluster=cluster,
        costs=costs,
        timeline=timeline,
        summary=summarise(timeline),
        peaks=tuple(size / unit if unit else 0.0 for size, unit in zip(residual_peaks, units, strict=True)),
        peaks_bytes=tuple(residual_peaks) if sized else (),
    )


def _wired(
    stages: StageGraph, ranks: int, scenario: Scenario, costs: tuple[StageCost, ...]
) -> tuple[StageGraph, Cluster]:
    """The stages with messages of some size, and links on which these take the times that are given; and
    uplinks on which copies do."""
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
        uplink = Link(bandwidth_bytes_per_s=copied.offloaded_bytes / copied.offload_s)
        names = [f"uplink {rank // scenario.per_uplink}" for rank in range(ranks)]
        switches = dict.fromkeys(names, uplink)
        devices = tuple(
            replace(device, switch=name, host_link=uplink)
            for device, name in zip(devices, names, strict=True)
        )
    return stages, Cluster(devices=devices, within_node=link, node_link=shared, switches=switches)


LESS = 0.9
"""What is left of a time in `sensitivity`."""

EPS = 1e-9


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place of a rank's row at which two schedules differ. actions: what each runs there and when
    it begins; "" where its row has ended."""

    rank: int
    place: int
    actions: tuple[str, str]
    starts_s: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why an action begins when it does. reason: "rank" (its rank ran `cause` until then), "message"
    (`cause` was done before, its results were there then), "partner" (the same stage on another rank could
    not earlier), or "start" (nothing was before it)."""

    action: str
    rank: int
    start_s: float
    end_s: float
    reason: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What a step takes if one thing takes 10 % less. what: "F", "I", "W" or "transfers".  stage: -1 for
    transfers."""

    what: str
    stage: int
    step_s: float
    saved_s: float


def divergences(one: SimulatedSchedule, other: SimulatedSchedule) -> list[Divergence]:
    """Of every rank whose rows differ the first place.

    Raises: ScheduleError unless both have as many ranks.
    """
    if one.schedule.ranks != other.schedule.ranks:
        raise ScheduleError(
            f"{one.schedule.name} has {one.schedule.ranks} ranks, {other.schedule.name} has "
            f"{other.schedule.ranks}",
            hint="compare schedules on the same ranks",
        )
    begun = [_events(simulated) for simulated in (one, other)]
    found = []
    for rank in range(one.schedule.ranks):
        rows = [list(map(str, simulated.schedule.rows[rank])) for simulated in (one, other)]
        for place, (a, b) in enumerate(zip_longest(*rows, fillvalue="")):
            if a != b:
                starts = tuple(
                    events[action].start_s if action else simulated.timeline.step_s
                    for action, events, simulated in zip((a, b), begun, (one, other), strict=True)
                )
                found.append(
                    Divergence(rank=rank, place=place, actions=(a, b), starts_s=(starts[0], starts[1]))
                )
                break
    return found


def idle_side_by_side(one: SimulatedSchedule, other: SimulatedSchedule) -> list[tuple[str, float, float]]:
    """(reason, rank-seconds in the one, in the other), the largest difference first."""
    first, second = (explain(simulated).by_reason for simulated in (one, other))
    rows = [(reason, first.get(reason, 0.0), second.get(reason, 0.0)) for reason in {**first, **second}]
    return sorted(rows, key=lambda row: -abs(row[1] - row[2]))


def why(simulated: SimulatedSchedule, action: str) -> list[Cause]:
    """The chain of causes from an action back to the start of the step, the action first.

    Raises: ScheduleError if the schedule has no such action.
    """
    events = _events(simulated)
    at = parse_action(action)
    if str(at) not in events:
        raise ScheduleError(
            f"{simulated.schedule.name} does not run {at}",
            hint=f"name an action of its rows, such as {next(iter(events))}",
        )
    chain: list[Cause] = []
    while True:
        cause = _cause(simulated, events, at)
        chain.append(cause)
        if cause.reason == "start":
            return chain
        at = parse_action(cause.cause)


def _events(simulated: SimulatedSchedule) -> dict[str, Event]:
    """Action -> its event, of all that schedules may say."""
    own = {str(action) for row in simulated.schedule.rows for action in row}
    return {event.action: event for event in simulated.timeline.events if event.action in own}


def _cause(simulated: SimulatedSchedule, events: dict[str, Event], action: Action) -> Cause:
    event = events[str(action)]
    shards = flow_of(simulated.stages).shards.get(action.stage, ())
    best = max(_held_up(simulated, events, action), default=(0.0, "start", ""))
    if best[0] < event.start_s - EPS:  # the action itself was ready: another rank of its stage was not
        for other in shards:
            ways = list(_held_up(simulated, events, replace(action, stage=other)))
            if ways and max(ways)[0] > best[0] + EPS:
                best = max(ways)[0], "partner", str(replace(action, stage=other))
                partner = max(ways)
        if best[1] == "partner":
            best = partner[0], partner[1], partner[2]
    if best[2] == "":
        best = 0.0, "start", ""
    return Cause(
        action=str(action),
        rank=event.rank,
        start_s=event.start_s,
        end_s=event.end_s,
        reason=best[1],
        cause=best[2],
    )


def _held_up(
    simulated: SimulatedSchedule, events: dict[str, Event], action: Action
) -> Iterator[tuple[float, str, str]]:
    """(until when, how, by which action) for all that an action waits for."""
    schedule, flow = simulated.schedule, flow_of(simulated.stages)
    row = [str(one) for one in schedule.rows[schedule.placement[action.stage]]]
    place = row.index(str(action))
    if place:
        yield events[row[place - 1]].end_s, "rank", row[place - 1]
    for milestone in needs(action, flow):
        name = name_of(milestone, schedule)
        if name in events and name != (row[place - 1] if place else ""):
            source = schedule.placement[milestone[0]]
            target = schedule.placement[action.stage]
            late = 0.0 if source == target else _message_s(simulated, milestone[0], action)
            yield events[name].end_s + late, "message", name


def _message_s(simulated: SimulatedSchedule, source: int, action: Action) -> float:
    """From the end of an action until its results are there: the last message along that edge."""
    letters = "F" if action.kind == "F" else "B"
    name = f"{source}SEND_{letters}{action.microbatch}>{action.stage}"
    sent = [event for event in simulated.timeline.events if event.action == name]
    return sent[0].end_s - sent[0].start_s if sent else 0.0


def sensitivity(simulated: SimulatedSchedule) -> list[Sensitivity]:
    """The step if F, I or W of one stage, or all transfers, take 10 % less, in the same order of actions;
    what saves most first. Replicas and shards of a stage change together."""
    step_s = simulated.timeline.step_s
    found: list[Sensitivity] = []
    for stage in sorted({simulated.stages.origin(s) for s in range(len(simulated.costs))}):
        for what in ("F", "I", "W"):
            costs = tuple(
                _less(cost, what) if simulated.stages.origin(s) == stage else cost
                for s, cost in enumerate(simulated.costs)
            )
            new_s = simulate(simulated.program, simulated.stages, costs, simulated.cluster).step_s
            found.append(Sensitivity(what=what, stage=stage, step_s=new_s, saved_s=step_s - new_s))
    faster = _faster_links(simulated.cluster)
    if faster != simulated.cluster:
        new_s = simulate(simulated.program, simulated.stages, simulated.costs, faster).step_s
        found.append(Sensitivity(what="transfers", stage=-1, step_s=new_s, saved_s=step_s - new_s))
    return sorted(found, key=lambda one: -one.saved_s)


def _less(cost: StageCost, what: str) -> StageCost:
    name = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s"}[what]
    saved = (1 - LESS) * getattr(cost, name)
    whole = cost.backward_s - (0.0 if what == "F" else saved)
    return replace(cost, backward_s=whole, **{name: getattr(cost, name) - saved})


def _faster_links(cluster: Cluster) -> Cluster:
    def faster(link: Link) -> Link:
        return replace(
            link,
            latency_s=link.latency_s * LESS,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / LESS,
        )

    node = cluster.node_link
    return replace(
        cluster, within_node=faster(cluster.within_node), node_link=None if node is None else faster(node)
    )
