"""Tuning a schedule by hand: where two differ, why an action begins when it does, and what saves most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from ..ir.action import AWAIT, OFFLOAD, RELOAD, Action, B, F, I, W, parse_action
from ..ir.cluster import Link
from ..ir.costs import StageCost
from ..ir.dependencies import needs, produces
from ..ir.errors import ScheduleError
from ..ir.flow import flow_of
from ..ir.operation import OPERATIONS
from ..ir.timeline import Event
from ..simulator.simulate import simulate
from .scenario import SimulatedSchedule, explain

LESS = 0.9

EPS = 1e-9

COPY_NEEDED = {AWAIT: OFFLOAD, RELOAD: OFFLOAD, B: RELOAD, I: RELOAD}
"""The copy that an action waits for, if its row has it."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place of a rank's row at which two schedules differ, and what each runs there; "" where its
    row has ended."""

    rank: int
    place: int
    actions: tuple[str, str]
    starts_s: tuple[float, float]


@dataclass(frozen=True)
class Cause:
    """Why an action begins when it does. reason: "rank" (its rank, or another rank of its stage, ran `cause`
    until then), "message" (the results of `cause` were there then), or "start" (nothing was before it)."""

    action: str
    rank: int
    start_s: float
    end_s: float
    reason: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The step if one thing takes 10 % less. what: "F", "I", "W", or "transfers" with stage -1."""

    what: str
    stage: int
    step_s: float
    saved_s: float


def divergences(one: SimulatedSchedule, other: SimulatedSchedule) -> list[Divergence]:
    if one.schedule.ranks != other.schedule.ranks:
        raise ScheduleError(
            f"{one.schedule.name} has {one.schedule.ranks} ranks, {other.schedule.name} has "
            f"{other.schedule.ranks}",
            hint="compare schedules on the same ranks",
        )
    begun = [{e.action: e for e in simulated.timeline.events} for simulated in (one, other)]
    found = []
    for rank in range(one.schedule.ranks):
        first, second = (map(str, simulated.schedule.rows[rank]) for simulated in (one, other))
        for place, actions in enumerate(zip_longest(first, second, fillvalue="")):
            if actions[0] != actions[1]:
                a, b = (
                    events[action].start_s if action else simulated.timeline.step_s
                    for action, events, simulated in zip(actions, begun, (one, other), strict=True)
                )
                found.append(Divergence(rank=rank, place=place, actions=actions, starts_s=(a, b)))
                break
    return found


def idle_side_by_side(one: SimulatedSchedule, other: SimulatedSchedule) -> list[tuple[str, float, float]]:
    """(reason, rank-seconds in the one, in the other), the largest difference first."""
    first, second = (explain(simulated).by_reason for simulated in (one, other))
    rows = [(reason, first.get(reason, 0.0), second.get(reason, 0.0)) for reason in {**first, **second}]
    return sorted(rows, key=lambda row: -abs(row[1] - row[2]))


class CausesOfBlocks:
    """What each action of a simulated step waited for, and what waited for it."""

    def __init__(self, simulated: SimulatedSchedule) -> None:
        self._schedule, self._flow = simulated.schedule, flow_of(simulated.stages)
        self._events = {event.action: event for event in simulated.timeline.events}
        self._rows = [[str(action) for action in row] for row in simulated.schedule.rows]
        self._place = {
            action: (rank, at) for rank, row in enumerate(self._rows) for at, action in enumerate(row)
        }

    def chain(self, action: str) -> list[Cause]:
        """The causes from an action back to the start of the step, the action first. Raises: ScheduleError
        if no rank runs it."""
        at = self._known(action)
        chain: list[Cause] = []
        while True:
            cause = self._cause(at)
            chain.append(cause)
            if cause.reason == "start":
                return chain
            at = parse_action(cause.cause)

    def waits(self, action: str) -> list[tuple[float, str, str]]:
        """(until when, how, for which action) for all that an action waits for, the latest first. Raises: as
        `chain`."""
        return sorted(self._held_up(self._known(action)), reverse=True)

    def followers(self, action: str) -> list[Event]:
        """Those that needed this action, or came next on its rank, in the order in which they begin. Raises:
        as `chain`."""
        one = self._known(action)
        rank, at = self._place[action]
        names = self._rows[rank][at + 1 : at + 2]
        made = set(produces(one))
        near = {one.stage, *self._flow.reads_from[one.stage], *self._flow.read_by[one.stage]}
        for stage in near:
            for kind in (F, B, I, W):
                other = Action(stage, kind, one.microbatch)
                if str(other) in self._place and not made.isdisjoint(needs(other, self._flow)):
                    names.append(str(other))
        events = [self._events[name] for name in dict.fromkeys(names)]
        return sorted(events, key=lambda event: event.start_s)

    def _known(self, action: str) -> Action:
        at = parse_action(action)
        if str(at) not in self._place:
            raise ScheduleError(
                f"{self._schedule.name} does not run {at}",
                hint=f"name an action of its rows, such as {next(iter(self._place))}",
            )
        return at

    def _cause(self, action: Action) -> Cause:
        event, start = self._events[str(action)], (0.0, "start", "")
        latest = max(self._held_up(action), default=start)
        if latest[0] < event.start_s - EPS:  # the action itself was ready: another rank of its stage was not
            for other in self._flow.shards.get(action.stage, ()):
                late = max(self._held_up(replace(action, stage=other)), default=start)
                if late[0] > latest[0] + EPS:
                    latest = late
        return Cause(str(action), event.rank, event.start_s, event.end_s, *latest[1:])

    def _held_up(self, action: Action) -> Iterator[tuple[float, str, str]]:
        rank, at = self._place[str(action)]
        row, before = self._rows[rank], []
        # A copy, say, runs beside computing: it holds up the copies behind it, and what needs it.
        for stream in dict.fromkeys(("compute", self._events[str(action)].stream)):
            earlier = (row[place] for place in range(at - 1, -1, -1))
            before += next(([name] for name in earlier if self._events[name].stream == stream), [])
        for name in before:
            yield self._events[name].end_s, "rank", name
        beside = [o.kind for o in OPERATIONS.values() if o.before is not None and o.stands_at(action.kind)]
        beside += [COPY_NEEDED[action.kind]] if action.kind in COPY_NEEDED else []
        for name in (str(replace(action, kind=kind)) for kind in beside):
            if name in self._place and name not in before:
                yield self._events[name].end_s, "message", name
        for stage, microbatch, phase in needs(action, self._flow):
            makers = (str(Action(stage, kind, microbatch)) for kind in ((I, B) if phase else (F,)))
            name = next((maker for maker in makers if maker in self._place), "")
            if name and name not in before:
                letter = "F" if action.kind == F else "B"
                send = f"{stage}SEND_{letter}{action.microbatch}>{action.stage}"
                sent = self._events.get(send) if self._schedule.placement[stage] != rank else None
                yield (sent or self._events[name]).end_s, "message", name


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
    cluster, node = simulated.cluster, simulated.cluster.node_link
    faster = replace(
        cluster, within_node=_faster(cluster.within_node), node_link=None if node is None else _faster(node)
    )
    if faster != simulated.cluster:
        new_s = simulate(simulated.program, simulated.stages, simulated.costs, faster).step_s
        found.append(Sensitivity(what="transfers", stage=-1, step_s=new_s, saved_s=step_s - new_s))
    return sorted(found, key=lambda one: -one.saved_s)


def _less(cost: StageCost, what: str) -> StageCost:
    name = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s"}[what]
    saved = (1 - LESS) * getattr(cost, name)
    whole = cost.backward_s - (0.0 if what == "F" else saved)
    return replace(cost, backward_s=whole, **{name: getattr(cost, name) - saved})


def _faster(link: Link) -> Link:
    bandwidth = link.bandwidth_bytes_per_s / LESS
    return replace(link, latency_s=link.latency_s * LESS, bandwidth_bytes_per_s=bandwidth)
