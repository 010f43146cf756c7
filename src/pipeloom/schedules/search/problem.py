"""What the schedule search is asked: stages with times, bytes and ranks; the same as arrays; and the plain
timing of an order, which all engines share.

A unit is what begins at one moment: F, B or I of a stage, on all of its ranks; W of a stage on one rank.
Units are numbered so that those which one waits for stand before it: forwards in the order of the data,
backwards in the opposite one, then the weight gradients.

An order lists everything once: entry e stands for unit e // m and micro-batch e % m. Each entry begins as
soon as its ranks are free and what it waits for is there; messages from one rank to another follow each other
in the order in which they are sent. So an order in which nothing stands before what it needs can never block,
and gives the times that the simulator gives for its rows, unless a message there waits for its receive to be
posted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from ...ir.action import Action, B, F, I, Kind, W
from ...ir.columns import Bools, Floats, Longs
from ...ir.costs import StageCost
from ...ir.errors import ScheduleError
from ...ir.flow import dag
from ...ir.kernels import inlined, kernel
from ...ir.operation import ANCHORS, Operation
from ...ir.stages import StageGraph
from ...ir.text import enough_bytes
from ..language.placements import spread
from ..language.shape import Shape

EPS = 1e-9


class Units(NamedTuple):
    """Per unit its seconds, what it adds to its ranks' residuals, its kind (0 F, 1 B or I, 2 W), its stage;
    its ranks, those of unit u from `on_at[u]` on; what it needs, where in `TimingArrays.end` that is seen,
    and how long it then takes to arrive.  link, wire: of its messages that may wait for each other, from
    `sends_at[u]` on, the link and the seconds.  meet: whether two units share a rank.  tail: what must
    follow.  span: whether the longest time from a rank's first action to its last is to be short, and not
    the step."""

    microbatches: int
    seconds: Floats
    memory: Floats
    kind: Longs
    on_at: Longs
    on: Longs
    need_at: Longs
    need: Longs
    seen: Longs
    delay: Floats
    sends_at: Longs
    link: Longs
    wire: Floats
    meet: Bools
    tail: Floats
    cap: Floats
    span: bool


class TimingArrays(NamedTuple):
    """What timing writes. Per entry its end, and behind those when each message of `Units.link` is there; per
    link when it is free; per rank when it is free, what it holds and has held at most, and when its time
    began: negative before its first action where spans count, else 0."""

    end: Floats
    link: Floats
    free: Floats
    used: Floats
    peak: Floats
    began: Floats


@kernel
def reset(t: Units, c: TimingArrays) -> None:
    for link in range(len(c.link)):
        c.link[link] = 0.0
    for rank in range(len(c.free)):
        c.free[rank] = 0.0
        c.used[rank] = 0.0
        c.peak[rank] = 0.0
        c.began[rank] = -1.0 if t.span else 0.0


@inlined
def run_entry(t: Units, c: TimingArrays, u: int, b: int, m: int) -> float:
    """Run unit u of micro-batch b after all that came before. Returns: when it ends; or how long its ranks
    have then been at it, where spans count."""
    # end = max(its ranks are free, what it needs is there) + seconds
    begin = 0.0
    for at in range(t.on_at[u], t.on_at[u + 1]):
        begin = max(begin, c.free[t.on[at]])
    for at in range(t.need_at[u], t.need_at[u + 1]):
        begin = max(begin, c.end[t.seen[at] * m + b] + t.delay[at])
    end = begin + t.seconds[u]
    taken = 0.0
    c.end[u * m + b] = end
    for at in range(t.sends_at[u], t.sends_at[u + 1]):  # messages of a link follow each other
        there = max(end, c.link[t.link[at]]) + t.wire[at]
        c.link[t.link[at]] = there
        c.end[(len(t.seconds) + at) * m + b] = there
    for at in range(t.on_at[u], t.on_at[u + 1]):
        rank = t.on[at]
        c.free[rank] = end
        c.used[rank] += t.memory[u]
        c.peak[rank] = max(c.peak[rank], c.used[rank])
        if c.began[rank] < 0.0:
            c.began[rank] = begin
        taken = max(taken, end - c.began[rank])
    return taken


@kernel
def run_order(t: Units, c: TimingArrays, order: Longs) -> float:
    """Run an order. Returns: the seconds that are to be few, of the step or of the longest span."""
    reset(t, c)
    m, cost = t.microbatches, 0.0
    for entry in order:
        cost = max(cost, run_entry(t, c, entry // m, entry % m, m))
    return cost


@kernel
def excess(t: Units, c: TimingArrays) -> float:
    """By which share of their limits the ranks hold too much, all together."""
    over = 0.0
    for rank in range(len(t.cap)):
        if c.peak[rank] > t.cap[rank]:
            over += (c.peak[rank] - t.cap[rank]) / max(t.cap[rank], EPS)
    return over


@kernel
def rest(c: TimingArrays) -> float:
    """When ranks end on average: of orders with the same step the one that leaves more room is nearer a
    better one."""
    total = 0.0
    for rank in range(len(c.free)):
        total += c.free[rank]
    return total / len(c.free)


@kernel
def draw(seed: Longs) -> float:
    """A number from 0 to 1, the same sequence compiled or not. Source: MINSTD, Park and Miller, 1988."""
    seed[0] = seed[0] * 48271 % 2147483647  # below 2^47 in between: it fits compiled, too
    drawn: float = seed[0] / 2147483647
    return drawn


@dataclass(frozen=True, kw_only=True)
class SearchStage:
    """One stage: seconds of F and of B, or of I and W if `split`; bytes of residuals from F until B or W.

    after: the stages whose outputs it reads.  ranks: where it runs; on several, together.
    """

    name: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    split: bool = False
    residual_bytes: float = 0.0
    after: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        amounts = (self.forward_s, self.input_grad_s, self.weight_grad_s, self.residual_bytes)
        if not all(0 <= amount < inf for amount in amounts):
            raise ScheduleError(
                f"stage {self.name} has the amounts {', '.join(f'{a:g}' for a in amounts)}",
                hint="times and sizes are finite and at least 0",
            )

    @property
    def backward_s(self) -> float:
        return self.input_grad_s + self.weight_grad_s

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (F, I, W) if self.split else (F, B)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """All that begins at one moment, on all of `ranks`."""

    stage: int
    kind: Kind
    ranks: tuple[int, ...]


class QueuedMessage(NamedTuple):
    """What a unit sends to another one, from rank to rank."""

    maker: int
    reader: int
    link: tuple[int, int]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """Stages with their ranks, micro-batches, seconds of messages, and limits.

    transfer_s: of a message between two ranks; of single edges by (from stage, to stage).
    caps: most bytes of residuals per rank, if limited.  operations: that a user declared, anywhere behind
    their anchor.  shortest: "step"; or "span", the longest time from a rank's first action to its last. unit:
    bytes that the number 1 stands for where sizes were given as plain numbers.
    """

    stages: tuple[SearchStage, ...]
    microbatches: int
    transfer_s: float = 0.0
    edge_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    caps: tuple[float, ...] = ()
    operations: tuple[Operation, ...] = ()
    shortest: str = "step"
    unit: int = 1

    def __post_init__(self) -> None:
        if not self.stages or self.microbatches < 1:
            raise ScheduleError(
                f"a search over {len(self.stages)} stages and {self.microbatches} micro-batches",
                hint="give at least one of each",
            )
        if empty := sorted(set(range(self.ranks)) - {r for s in self.stages for r in s.ranks}):
            raise ScheduleError(f"rank {empty[0]} has no stage", hint="number the ranks from 0 without gaps")
        for operation in self.operations:
            what = ""
            if operation.after is None or operation.stream != "compute" or operation.every > 1:
                what = "is not a computation behind every one of its anchors"
            elif operation.acquired(0) or operation.released(0) or operation.meets is not None:
                what = "holds memory, or meets other stages"
            if what:
                raise ScheduleError(
                    f"operation {operation.letters} {what}: the search does not place such",
                    hint="search without it, and add it to the found recipe with insert=",
                )
        if self.caps and len(self.caps) != self.ranks:
            raise ScheduleError(
                f"{len(self.caps)} limits for {self.ranks} ranks", hint="give one limit, or one per rank"
            )

    def within(self, caps: tuple[float, ...]) -> SearchProblem:
        """The same within other limits. What does not depend on them is not worked out again."""
        other = replace(self, caps=caps)
        own = {"limits", "shape", "arrays", *vars(other)}
        vars(other).update({name: known for name, known in vars(self).items() if name not in own})
        vars(other)["arrays"] = self.arrays._replace(cap=other._rounded_limits)
        return other

    @cached_property
    def ranks(self) -> int:
        return 1 + max((rank for stage in self.stages for rank in stage.ranks), default=0)

    def shown_size(self, size: float) -> str:
        return enough_bytes(int(size)) if self.unit == 1 else f"{size / self.unit:g}"

    @cached_property
    def limits(self) -> tuple[float, ...]:
        return self.caps or (inf,) * self.ranks

    @cached_property
    def rank_bytes(self) -> tuple[float, ...]:
        return tuple(sum(s.residual_bytes for s in self.stages if r in s.ranks) for r in range(self.ranks))

    @cached_property
    def placed(self) -> tuple[StageGraph, tuple[int, ...]]:
        """The stage graph and the rank of each stage, as schedules have them: see `spread`."""
        edges = [(source, s) for s, stage in enumerate(self.stages) for source in stage.after]
        return spread(dag(len(self.stages), edges), [stage.ranks for stage in self.stages])

    def origin(self, stage: int) -> int:
        return self.placed[0].origin(stage)

    @cached_property
    def shape(self) -> Shape:
        """The problem as the schedule language has it. Sizes are rounded up to whole bytes."""
        graph, placement = self.placed
        own = [
            StageCost(
                forward_s=s.forward_s,
                backward_s=s.backward_s,
                input_grad_s=s.input_grad_s,
                weight_grad_s=s.weight_grad_s,
                residual_bytes=ceil(s.residual_bytes),
                carried_bytes=ceil(s.residual_bytes),
            )
            for s in self.stages
        ]
        return Shape(
            stages=graph,
            placement=placement,
            microbatches=self.microbatches,
            costs=tuple(own[self.origin(s)] for s in range(len(placement))),
            transfer_s=self._seconds_between,
            limit_bytes=self.caps or None,
            shortest=self.shortest,
        )

    def _seconds_between(self, source: int, target: int) -> float:
        one, other = self.origin(source), self.origin(target)
        return self.edge_s.get((one, other), self.edge_s.get((other, one), self.transfer_s))

    def delay(self, source: int, target: int) -> float:
        """Seconds from the end of a unit until its results are where another one runs."""
        return self._delay(self.units[source], self.units[target])

    def _delay(self, source: Unit, target: Unit) -> float:
        apart = any(a != b for a in source.ranks for b in target.ranks)
        if source.stage == target.stage or not apart:
            return 0.0
        given = self.edge_s.get((source.stage, target.stage), self.transfer_s)
        return self.edge_s.get((target.stage, source.stage), given)

    @cached_property
    def order_of_stages(self) -> tuple[int, ...]:
        flow = self.shape.flow
        return tuple(s for s in flow.order if s < len(self.stages))

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Stages that exchange anything, directly or through others, are of one part."""
        part = list(range(len(self.stages)))
        for s in self.order_of_stages:
            for source in self.stages[s].after:
                low, high = sorted((part[s], part[source]))
                part = [low if p == high else p for p in part]
        return tuple(tuple(s for s, p in enumerate(part) if p == own) for own in dict.fromkeys(part))

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        ahead, stages = self.order_of_stages, self.stages
        found = [Unit(stage=s, kind=F, ranks=stages[s].ranks) for s in ahead]
        found += [Unit(stage=s, kind=stages[s].kinds[1], ranks=stages[s].ranks) for s in reversed(ahead)]
        split = [s for s in reversed(ahead) if stages[s].split]
        found += [Unit(stage=s, kind=W, ranks=(r,)) for s in split for r in stages[s].ranks]
        for o in self.operations:
            own = [(s, r) for s in ahead for r in stages[s].ranks if o.runs(s, r, 0)]
            found += [Unit(stage=s, kind=o.kind, ranks=(r,)) for s, r in own]
        return tuple(found)

    @property
    def entries(self) -> int:
        return len(self.units) * self.microbatches

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        at = {(u.stage, u.kind): i for i, u in enumerate(self.units) if u.kind in (F, B, I)}
        late = {(u.stage, u.kind, u.ranks): i for i, u in enumerate(self.units)}
        anchors = {o.kind: ANCHORS[o.anchor] for o in self.operations}
        readers = [
            [t for t, stage in enumerate(self.stages) if s in stage.after] for s in range(len(self.stages))
        ]
        found: list[tuple[int, ...]] = []
        for u in self.units:
            stage = self.stages[u.stage]
            if u.kind == F:
                found.append(tuple(at[s, F] for s in stage.after))
            elif u.kind in anchors:
                kind = next(k for k in stage.kinds if k in anchors[u.kind])
                found.append((late[u.stage, W, u.ranks] if kind == W else at[u.stage, kind],))
            elif u.kind == W:
                found.append((at[u.stage, I],))
            else:
                back = (at[t, self.stages[t].kinds[1]] for t in readers[u.stage])
                found.append((at[u.stage, F], *back))
        return tuple(found)

    def seconds(self, unit: Unit) -> float:
        stage = self.stages[unit.stage]
        for o in self.operations:
            if o.kind == unit.kind:
                anchor = next(k for k in stage.kinds if k in ANCHORS[o.anchor])
                share = o.share * self.seconds(Unit(stage=unit.stage, kind=anchor, ranks=unit.ranks))
                return o.seconds_of(unit.stage) + share
        times = {F: stage.forward_s, B: stage.backward_s, I: stage.input_grad_s, W: stage.weight_grad_s}
        return times[unit.kind]

    def memory(self, unit: Unit) -> float:
        own = self.stages[unit.stage].residual_bytes
        return {F: own, B: -own, W: -own}.get(unit.kind, 0.0)

    @cached_property
    def arrays(self) -> Units:
        units, queued = self.units, self.queued_messages
        slots: dict[tuple[int, int], list[int]] = {}
        for number, one in enumerate(queued):
            slots.setdefault((one.reader, one.maker), []).append(number)
        edges: list[tuple[int, int, int, float]] = []  # reader, maker, where it is seen, seconds from then on
        for i, own in enumerate(self.needs):
            for p in own:
                waits = slots.get((i, p), [])
                edges += [(i, p, len(units) + number, 0.0) for number in waits]
                if not waits or len(waits) < len(self._links(p, i)):
                    edges.append((i, p, p, self._delay(units[p], units[i])))
        links = {link: n for n, link in enumerate(dict.fromkeys(one.link for one in queued))}
        kinds = {F: 0, B: 1, I: 1, W: 2}
        here = np.array([[float(r in u.ranks) for r in range(self.ranks)] for u in units])
        return Units(
            microbatches=self.microbatches,
            seconds=np.array([self.seconds(u) for u in units], np.float64),
            memory=np.array([self.memory(u) for u in units], np.float64),
            kind=np.array([kinds.get(u.kind, 2) for u in units], np.int64),
            on_at=_offsets([len(u.ranks) for u in units]),
            on=np.array([r for u in units for r in u.ranks], np.int64),
            need_at=_offsets(_counts([i for i, *_ in edges], len(units))),
            need=np.array([p for _, p, _, _ in edges], np.int64),
            seen=np.array([slot for _, _, slot, _ in edges], np.int64),
            delay=np.array([seconds for *_, seconds in edges], np.float64),
            sends_at=_offsets(_counts([one.maker for one in queued], len(units))),
            link=np.array([links[one.link] for one in queued], np.int64),
            wire=np.array([one.seconds for one in queued], np.float64),
            meet=(here @ here.T) > 0,
            tail=np.array([0.0] * len(units) if self.shortest == "span" else self.tails, np.float64),
            span=self.shortest == "span",
            cap=self._rounded_limits,
        )

    @property
    def _rounded_limits(self) -> Floats:
        """The limits, and what a sum of sizes may be off by."""
        return np.array(self.limits, np.float64) * (1 + 1e-12) + 1e-9

    def _links(self, maker: int, reader: int) -> list[tuple[int, int]]:
        source, target = self.units[maker], self.units[reader]
        if source.stage == target.stage:
            return []
        return [(a, b) for a in source.ranks for b in target.ranks if a != b]

    @cached_property
    def queued_messages(self) -> tuple[QueuedMessage, ...]:
        """Messages of links on which one may wait for another, by the unit that sends them. None waits where
        each unit sends one, which is through before the next unit can end."""
        if not self.transfer_s and not any(self.edge_s.values()):
            return ()
        sent: dict[tuple[int, int], list[QueuedMessage]] = {}
        for i, own in enumerate(self.needs):
            for p in own:
                seconds = self._delay(self.units[p], self.units[i])
                for link in self._links(p, i):
                    sent.setdefault(link, []).append(
                        QueuedMessage(maker=p, reader=i, link=link, seconds=seconds)
                    )
        queued = []
        for messages in sent.values():
            makers = {one.maker for one in messages}
            apart = min(self.seconds(self.units[p]) for p in makers)
            longest = max(one.seconds for one in messages)
            if longest > apart or (longest and len(makers) < len(messages)):
                queued += messages
        # As `add_transfers` writes the messages of an action: values along the flow, gradients against it.
        placed = {(rank, self.origin(stage)): stage for stage, rank in enumerate(self.placed[1])}
        place = {stage: at for at, stage in enumerate(self.shape.flow.order)}

        def served(one: QueuedMessage) -> int:
            at = place[placed[one.link[1], self.units[one.reader].stage]]
            return at if self.units[one.maker].kind == F else -at

        return tuple(sorted(queued, key=lambda one: (one.maker, served(one))))

    @cached_property
    def heads(self) -> tuple[float, ...]:
        """Per unit its longest way from the front, in seconds."""
        head: list[float] = []
        for i, u in enumerate(self.units):
            ways = (
                head[p] + self.seconds(self.units[p]) + self._delay(self.units[p], u) for p in self.needs[i]
            )
            head.append(max(ways, default=0.0))
        return tuple(head)

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """Per unit what must follow its end, on other units of the same micro-batch."""
        tail = [0.0] * len(self.units)
        for i in reversed(range(len(self.units))):
            u = self.units[i]
            for p in self.needs[i]:
                tail[p] = max(tail[p], tail[i] + self.seconds(u) + self._delay(self.units[p], u))
        return tuple(tail)

    def longest(self, source: int, target: int) -> float:
        """From the start of one unit to the end of another of the same micro-batch, along what units need."""
        far = {source: 0.0}
        for i in range(source + 1, target + 1):
            ways = [
                far[p] + self.seconds(self.units[p]) + self.delay(p, i) for p in self.needs[i] if p in far
            ]
            if ways:
                far[i] = max(ways)
        return far[target] + self.seconds(self.units[target])

    @cached_property
    def residual_seconds(self) -> tuple[float, ...]:
        """Per rank bytes x seconds of the residuals of one micro-batch, at least."""
        first = {(u.stage, r): i for i, u in enumerate(self.units) if u.kind == F for r in u.ranks}
        found = [0.0] * self.ranks
        for i, u in enumerate(self.units):
            for r in u.ranks if u.kind in (B, W) else ():
                found[r] += self.stages[u.stage].residual_bytes * self.longest(first[u.stage, r], i)
        return tuple(found)

    @cached_property
    def work(self) -> tuple[float, ...]:
        return tuple(sum(self.seconds(u) for u in self.units if r in u.ranks) for r in range(self.ranks))

    def actions(self, unit: int) -> tuple[tuple[int, int, Kind], ...]:
        """(rank, stage of `placed`, kind) of all that begins together as a unit."""
        u, placement = self.units[unit], self.placed[1]
        own = {placement[s]: s for s in range(len(placement)) if self.origin(s) == u.stage}
        return tuple((rank, own[rank], u.kind) for rank in u.ranks)

    def rows(self, order: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
        """The rows of an order of everything: entries are unit * micro-batches + micro-batch."""
        rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        known = [self.actions(u) for u in range(len(self.units))]
        for entry in order:
            unit, b = divmod(int(entry), self.microbatches)
            for rank, stage, kind in known[unit]:
                rows[rank].append(Action(stage, kind, b))
        return tuple(map(tuple, rows))


def _counts(numbers: Sequence[int], size: int) -> Longs:
    return np.bincount(np.array(numbers, np.int64), minlength=size)


def _offsets(lengths: Sequence[int] | Longs) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
