"""Causes: for everything in a timeline, what it waited for last.

A timeline says when things happened, a program in which order and who sends what to whom. Together they
tell why an action did not begin earlier, whoever made the timeline: its rank was busy, a message was not
there, a copy or a sum over ranks was not done.

Shared links serve first what asked first, one after the other. So what a wait for a link ends with is
whatever the link served last before: a message holds the links of both nodes for its bytes at their rate; a
copy, whose bytes no timeline tells, holds its switch until the next one begins. A sum over ranks, of which a
timeline only tells when each rank came to it and when it was done, is taken to hold its links where nothing
else did.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from string import digits
from typing import Literal, TypeAlias

import numpy as np

from ...checks.schedules import meeting_actions
from ...ir.action import (
    AWAIT,
    KINDS,
    OFFLOAD,
    RECOMPUTE,
    REDUCE,
    RELOAD,
    STEP,
    Action,
    B,
    F,
    I,
    parse_action,
)
from ...ir.cluster import Cluster
from ...ir.columns import RECV_B_, RECV_F_, SEND_B_, SEND_F_, Columns
from ...ir.dependencies import needs, produces
from ...ir.errors import ScheduleError
from ...ir.explanation import PathStep
from ...ir.flow import Flow, flow_of
from ...ir.operation import OPERATIONS
from ...ir.schedule import Program
from ...ir.shared_weights import reductions
from ...ir.stages import StageGraph
from ...ir.timeline import Timeline
from ..all_reduce import link_seconds
from ..layout import message_bytes
from ..shared_links import crosses
from ..timeline_events import SimulatedEvents

Key: TypeAlias = tuple[str, int]
"""(an instruction's text, how often it came before): a step may run a program several times."""


@dataclass(slots=True, eq=False)  # looked up very often, and each is made once; not frozen, as that is slow
class TimedSpan:
    """Something that took time: an action, a message on its way, a sum over ranks, a copy.

    place: which of its rank's compute actions it is; of a message, the place of the action that waits; of a
        copy, how many compute actions stand in front of it.
    waiting: of something that holds a shared link, the message or copy that waits for it; then it ends when
        it lets go of the link.
    """

    kind: Literal["compute", "transfer", "reduce", "copy"]
    rank: int
    action: str
    repeat: int
    start_s: float
    end_s: float
    place: int
    to_rank: int = -1
    waiting: str = ""


def closes_update(text: str) -> bool:
    """Whether an action is the STEP of the only update, or of one of several."""
    return text.strip(digits) == STEP


class SpansByEnd:
    def __init__(self, spans: Iterable[TimedSpan]) -> None:
        self._spans = sorted(spans, key=lambda i: i.end_s)
        self._ends = [i.end_s for i in self._spans]

    def until(self, at_s: float, *, most: int | None = None) -> TimedSpan | None:
        """The last one that took time and ended by `at_s`; `most`: of the first so many."""
        place = bisect_right(self._ends, at_s, hi=most)
        while place:
            place -= 1
            if self._spans[place].end_s > self._spans[place].start_s:
                return self._spans[place]
        return None


COPY_STREAMS = ("d2h", "h2d")
Times: TypeAlias = tuple[float, float]
"""Start and end in seconds."""


class TimelineIndex:
    """A timeline read once.

    rows: per rank its compute actions in order.  computed: the same by text and repeat.
    sent: messages on their way, by the text of their SEND.  received: receives that waited.
    copies: to the host and back, with their rank and stream.  beside: per rank what operations do beside
    computing.  sums: per rank its sums over ranks.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.rows: list[list[TimedSpan]] = [[] for _ in range(timeline.ranks)]
        self.computed: dict[Key, TimedSpan] = {}
        self.sent: dict[Key, Times] = {}
        self.received: dict[Key, Times] = {}
        self.copies: dict[Key, tuple[int, str, Times]] = {}
        self.beside: list[list[TimedSpan]] = [[] for _ in range(timeline.ranks)]
        self.sums: list[list[TimedSpan]] = [[] for _ in range(timeline.ranks)]
        once = isinstance(timeline.events, SimulatedEvents)  # the simulator runs each instruction once
        repeats: Counter[tuple[str, int, str]] = Counter()
        for stream, rank, text, start_s, end_s in zip(*timeline.listed(), strict=True):
            repeat = 0
            if not once:
                repeat = repeats[stream, rank, text]
                repeats[stream, rank, text] += 1
            if stream == "compute":
                row = self.rows[rank]
                item = TimedSpan("compute", rank, text, repeat, start_s, end_s, len(row))
                self.computed[text, repeat] = item
                row.append(item)
            elif stream == "send" and "SEND" in text:
                self.sent[text, repeat] = start_s, end_s
            elif stream in COPY_STREAMS:
                self.copies[text, repeat] = rank, stream, (start_s, end_s)
            elif stream in ("send", "host"):
                self.beside[rank].append(TimedSpan("copy", rank, text, 0, start_s, end_s, 0))
            elif "RECV" in text:
                self.received[text, repeat] = start_s, end_s
            elif text not in ("END", "ROOM"):
                self.sums[rank].append(TimedSpan("reduce", rank, text, 0, start_s, end_s, 0))


Link: TypeAlias = tuple[str, int | str]
"""("out of" or "into", a node); or (a copy stream, a switch)."""
Served: TypeAlias = tuple[list[Times], list[Key]]
"""What a link served, in order: from when until when it held the link at most, and what it was."""


class LinkOccupancy:
    """Looks up what held a link. Takes time in proportion to what goes through shared links to make."""

    def __init__(
        self, program: Program, index: TimelineIndex, stages: StageGraph, flow: Flow, cluster: Cluster
    ) -> None:
        self._links: dict[str, tuple[Link, ...]] = {}
        """Message -> the shared links that it goes through."""
        self._held: dict[str, float] = {}
        """Message -> for how long it holds them, in seconds."""
        served: dict[Link, list[tuple[Times, Key]]] = defaultdict(list)
        if cluster.node_link is not None:
            self._read_routes(program, stages, flow, cluster)
            for key, (start_s, _) in index.sent.items():
                for link in self._links.get(key[0], ()):
                    served[link].append(((start_s, start_s + self._held[key[0]]), key))
        self._switch = [device.switch for device in cluster.devices]
        self._copy: dict[Key, Link] = {}
        for key, (rank, stream, times) in index.copies.items():
            if (switch := self._switch[rank]) is not None and stream in COPY_STREAMS:
                self._copy[key] = (stream, switch)
                served[stream, switch].append((times, key))
        self._served: dict[Link, Served] = {}
        for link, entries in served.items():
            entries.sort(key=lambda entry: entry[0])
            self._served[link] = [times for times, _ in entries], [key for _, key in entries]

        self._sums: list[tuple[TimedSpan, set[Link]]] = []
        """What sums over ranks there were, with the links that they go through."""
        for row, items in zip(reductions(stages, program.placement), index.sums, strict=False):
            links: set[Link] = set()
            for tie in row:
                links |= link_seconds(1, tie.ranks, cluster).keys()
            self._sums += [(item, links) for item in items if links and REDUCE in item.action]

    def _read_routes(self, program: Program, stages: StageGraph, flow: Flow, cluster: Cluster) -> None:
        assert cluster.node_link is not None
        columns, messages = program.columns, program.message_index(flow)
        sends = np.flatnonzero((columns.kind == SEND_F_) | (columns.kind == SEND_B_))
        ends = [
            (program.placement[a], program.placement[b])
            for a, b in zip(messages.routes.sender.tolist(), messages.routes.receiver.tolist(), strict=True)
        ]
        shared = np.array([crosses(cluster, a, b) for a, b in ends], np.bool_)
        sends = sends[shared[messages.route[sends]]]
        held = message_bytes(messages.routes, stages) / cluster.node_link.bandwidth_bytes_per_s
        for route, text in zip(messages.route[sends].tolist(), columns.texts(sends), strict=True):
            a, b = (cluster.devices[rank].node for rank in ends[route])
            self._links[text] = ("out of", a), ("into", b)
            self._held[text] = float(held[route])

    def summing(self, key: Key, start_s: float) -> TimedSpan | None:
        """A sum over ranks that went on until a message began, or longer, and goes through a link of it."""
        links = self._links.get(key[0], ())
        for item, held in self._sums if links else ():
            if item.start_s < start_s <= item.end_s and not held.isdisjoint(links):
                return item
        return None

    def before(self, key: Key, start_s: float, since_s: float) -> tuple[Key, float] | None:
        """What held a link of a message or copy that waited from `since_s` to `start_s`, and until when; of
        two links that which was free last. None if all of them were free."""
        copy = self._copy.get(key)
        best: tuple[Key, float] | None = None
        for link in self._links.get(key[0], ()) if copy is None else (copy,):
            times, keys = self._served[link]
            # A tuple of one number sorts before every pair that begins with it: the last one that began
            # earlier, and not what began just then, such as the item itself.
            place = bisect_left(times, (start_s,)) - 1
            if place >= 0:
                until_s = min(times[place][1], start_s)
                if until_s > max(since_s, best[1] if best else since_s):
                    best = keys[place], until_s
        return best


COPIES = {kind: row.stream for kind, row in KINDS.items() if row.stream in ("d2h", "h2d")}
"""Kind -> the stream that it runs on."""
ON_RESIDUALS = (F, OFFLOAD, AWAIT, RELOAD, RECOMPUTE, B, I)
"""What makes, treats and reads the residuals of a micro-batch, in order."""


def _other_ends(columns: Columns) -> list[str]:
    """Per entry of a RECV the text of its SEND; of others nothing of use."""
    kind = np.where(columns.kind == RECV_F_, SEND_F_, SEND_B_).astype(columns.kind.dtype)
    return replace(columns, kind=kind, stage=columns.peer, peer=columns.stage).texts()


class Causes:
    """Looks up what an item waited for. Takes time linear in timeline and program to make."""

    def __init__(
        self, program: Program, timeline: Timeline, stages: StageGraph, cluster: Cluster | None = None
    ) -> None:
        """cluster: where it ran, to know of links that several ranks share."""
        self._flow = flow_of(stages)
        self._causes: dict[TimedSpan, TimedSpan | None] = {}
        self._roots: dict[TimedSpan, TimedSpan | None] = {}
        self._read: dict[str, Action | None] = {}
        self._messages: dict[tuple[str, TimedSpan], TimedSpan | None] = {}
        self._read_program(program, stages)
        index = TimelineIndex(timeline)
        self._occupancy = LinkOccupancy(program, index, stages, self._flow, cluster) if cluster else None
        self._read_timeline(index)

    def _read_program(self, program: Program, stages: StageGraph) -> None:
        """Notes texts only: what few actions are looked at closely is read from them later."""
        columns = program.columns
        self._actions: dict[str, int] = {}
        """Compute action -> its entry in the columns."""
        self._columns = columns
        present = (OPERATIONS.get(kind) for kind in columns.kinds)
        self._meets = bool(self._flow.shards) or any(o and o.meets is not None for o in present)
        self._receives: dict[str, list[str]] = {}
        """Compute action or copy -> the messages that it waits for, by the text of their SEND."""
        self._user: dict[str, str] = {}
        self._maker: dict[str, str] = {}
        self._issuer: dict[str, str] = {}
        """OFFLOAD or RELOAD -> the compute action in front of it."""
        self._before: dict[str, str] = {}
        """Message -> the one that its link carries before it."""
        self._received: dict[str, str] = {}
        """Message -> the text of its RECV."""
        compute = columns.is_compute.tolist()
        texts, codes, peers = columns.texts(), columns.kind.tolist(), columns.peer.tolist()
        other_end = _other_ends(columns)
        for begin, end in pairwise(columns.offsets.tolist()):
            newest, waiting = "", list[str]()
            sent: dict[int, str] = {}
            for entry in range(begin, end):
                text, code = texts[entry], codes[entry]
                if code in (SEND_F_, SEND_B_):
                    self._maker[text] = newest
                    to_rank = program.placement[peers[entry]]
                    if to_rank in sent:
                        self._before[text] = sent[to_rank]
                    sent[to_rank] = text
                    continue
                if code in (RECV_F_, RECV_B_):
                    self._received[other_end[entry]] = text
                    waiting.append(other_end[entry])
                    continue
                if waiting:
                    self._receives[text] = waiting
                if compute[entry]:
                    self._actions[text] = entry
                    if columns.kinds[code] in COPIES:
                        self._issuer[text] = newest
                        waiting = waiting.copy()
                        continue
                    newest = text
                if waiting:
                    self._user.update(dict.fromkeys(waiting, text))
                    waiting = []
        self._placement = program.placement
        everyone = list(range(columns.ranks))
        self._partners = [
            everyone if program.clips else sorted({rank for reduction in row for rank in reduction.ranks})
            for row in reductions(stages, program.placement)
        ]

    def _read_timeline(self, index: TimelineIndex) -> None:
        self.rows, self._made = index.rows, index.computed
        self._moved, self._waited, self._sums = index.sent, index.received, index.sums
        self._computed = [SpansByEnd(row) for row in self.rows]
        self._copied = [SpansByEnd(row) for row in index.beside]
        self._beside = {item.action: item for row in index.beside for item in row}
        self.busy_s = [sum(i.end_s - i.start_s for i in row) for row in self.rows]
        self._copies: dict[Key, TimedSpan] = {}
        """What is copied to the host and back; beside other copies, each stream on its own."""
        lanes: dict[tuple[int, str], list[TimedSpan]] = defaultdict(list)
        for (text, repeat), (rank, stream, times) in index.copies.items():
            issuer = self._made.get((self._issuer.get(text, ""), repeat))
            item = TimedSpan("copy", rank, text, repeat, *times, issuer.place + 1 if issuer else 0)
            self._copies[text, repeat] = item
            lanes[rank, stream].append(item)
        self._lanes = {lane: SpansByEnd(items) for lane, items in lanes.items()}

    @cached_property
    def _arrived(self) -> list[SpansByEnd]:
        """Messages by the rank that they go to; few timelines ask for them."""
        found: list[list[TimedSpan]] = [[] for _ in self.rows]
        for text, repeat in self._moved:
            user = self._made.get((self._user.get(text, ""), repeat))
            if user and (item := self.message(text, user)):
                found[user.rank].append(item)
        return [SpansByEnd(row) for row in found]

    def _action(self, text: str) -> Action | None:
        if text not in self._read:
            entry, columns = self._actions.get(text), self._columns
            self._read[text] = (
                None
                if entry is None
                else Action(
                    int(columns.stage[entry]),
                    columns.kinds[columns.kind[entry]],
                    int(columns.microbatch[entry]),
                )
            )
        return self._read[text]

    def find(self, text: str) -> TimedSpan:
        """An action of the program by its text. Raises: ScheduleError if no rank runs it."""
        text = str(parse_action(text))
        item = self._made.get((text, 0)) or self._copies.get((text, 0)) or self._beside.get(text)
        if item is None:
            raise ScheduleError(
                f"no rank runs {text}",
                hint=f"name an action of its rows, such as {next(iter(self._actions))}",
            )
        return item

    def before(self, item: TimedSpan) -> TimedSpan | None:
        """The compute action before this one on its rank."""
        return self.rows[item.rank][item.place - 1] if item.place else None

    def cause(self, item: TimedSpan) -> TimedSpan | None:
        """What ended last of all that an item waited for; None if it waited for nothing.

        Where an action's rank became free just as its message came, the rank is the cause.
        """
        if item not in self._causes:
            self._causes[item] = max(self.waits(item), key=lambda i: i.end_s, default=None)
        return self._causes[item]

    def waits(self, item: TimedSpan) -> list[TimedSpan]:
        """All that an item waited for."""
        if item.kind == "compute":
            found = list(self._needs(item))
        elif item.kind == "transfer":
            found = list(self._held_up(item))
        elif item.kind == "reduce":
            found = [i for rank in self._peers(item) if (i := self._computed[rank].until(item.start_s))]
        elif (item.action, item.repeat) in self._copies:
            found = list(self._issued(item))
            if holder := self._holder(item, max((i.end_s for i in found), default=0.0)):
                found.append(holder)
        else:
            found = [i for i in (self._computed[item.rank].until(item.start_s),) if i]
        return found

    def _needs(self, item: TimedSpan) -> Iterator[TimedSpan]:
        previous = self.before(item)
        if previous is not None:
            yield previous
        for message in self._receives.get(item.action, ()):
            if moved := self.message(message, item):
                yield moved
        if closes_update(item.action):
            yield from self._reduction(item)
            lanes = (self._lanes.get((item.rank, stream)) for stream in COPIES.values())
            yield from (copy for lane in lanes if lane and (copy := lane.until(item.start_s)))
        if (self._copies or self._meets) and (action := self._action(item.action)) is not None:
            if reload := self._reload(action, item.repeat):
                yield reload
            for other in meeting_actions(action, self._flow):
                if (partner := self._made.get((str(other), item.repeat))) and (last := self.before(partner)):
                    yield last
        if copy := self._copied[item.rank].until(item.start_s):
            yield copy

    def _reload(self, action: Action, repeat: int) -> TimedSpan | None:
        """The copy that a RECOMPUTE waits for, or a backward where nothing is recomputed; or an AWAIT."""
        again = str(replace(action, kind=RECOMPUTE)) in self._actions
        if action.kind not in (AWAIT, *((RECOMPUTE,) if again else (B, I))):
            return None
        kind = OFFLOAD if action.kind == AWAIT else RELOAD
        return self._copies.get((str(replace(action, kind=kind)), repeat))

    def _issued(self, copy: TimedSpan) -> Iterator[TimedSpan]:
        """What a copy to the host or back waits for: its rank, its stream, and of a RELOAD its OFFLOAD."""
        action = parse_action(copy.action)
        if issuer := self._made.get((self._issuer[copy.action], copy.repeat)):
            yield issuer
        for message in self._receives.get(copy.action, ()):
            if moved := self.message(message, copy):
                yield moved
        if action.kind == RELOAD:  # in a window of steps its OFFLOAD may have been before that
            if offload := self._copies.get((str(replace(action, kind=OFFLOAD)), copy.repeat)):
                yield offload
        if earlier := self._lanes[copy.rank, COPIES[action.kind]].until(copy.start_s):
            yield earlier

    def message(self, text: str, user: TimedSpan) -> TimedSpan | None:
        """A message, by the text of its SEND, on its way to `user`; None if the timeline does not have it.

        A run notes when its receiver waited for it, but not when it moved: it is then taken to be on its
        way from the end of the action that made it, or from when the receiver began to wait if that was
        later, as it may have lain there before.
        """
        if (text, user) not in self._messages:
            self._messages[text, user] = self._message(text, user)
        return self._messages[text, user]

    def _message(self, text: str, user: TimedSpan) -> TimedSpan | None:
        repeat = user.repeat
        made = self._made.get((self._maker.get(text, ""), repeat))
        if made is None:
            return None
        start_s = end_s = made.end_s
        if (moved := self._moved.get((text, repeat))) is not None:
            start_s, end_s = moved
        elif (waited := self._waited.get((self._received[text], repeat))) is not None:
            end_s = waited[1]
            start_s = min(max(made.end_s, waited[0]), end_s)
        return TimedSpan("transfer", made.rank, text, repeat, start_s, end_s, user.place, user.rank)

    def maker(self, message: TimedSpan) -> TimedSpan:
        return self._made[self._maker[message.action], message.repeat]

    def _held_up(self, message: TimedSpan) -> Iterator[TimedSpan]:
        maker = self.maker(message)
        yield maker
        latest_s = maker.end_s
        moved = (message.action, message.repeat) in self._moved
        before = self._before.get(message.action)
        if moved and before is not None and (user := self._made.get((self._user[before], message.repeat))):
            if earlier := self.message(before, user):
                yield earlier
                latest_s = max(latest_s, earlier.end_s)
        holder = self._holder(message, latest_s)
        if holder is not None:
            yield holder
            latest_s = holder.end_s
        # So far what surely held it up. What follows is likely, and asked for only where that leaves a gap.
        if latest_s < message.start_s:
            # Its receive was posted late, or it lay there until its rank came for it.
            if done := self._computed[message.to_rank].until(message.start_s, most=message.place):
                yield done
                latest_s = max(latest_s, done.end_s)
            if moved and (other := self._arrived[message.to_rank].until(message.start_s)):
                yield other
                latest_s = max(latest_s, other.end_s)
        if self._occupancy is not None and latest_s < message.start_s:
            key = message.action, message.repeat
            if moved and (total := self._occupancy.summing(key, message.start_s)):
                yield replace(self._summed(total, message.place, message.start_s), waiting=message.action)

    def _holder(self, item: TimedSpan, since_s: float) -> TimedSpan | None:
        """What held a shared link that a message or a copy waited for from `since_s` on."""
        if self._occupancy is None:
            return None
        found = self._occupancy.before((item.action, item.repeat), item.start_s, since_s)
        if found is None:
            return None
        (text, repeat), until_s = found
        held = self._copies.get((text, repeat))
        if held is None and (user := self._made.get((self._user.get(text, ""), repeat))):
            held = self.message(text, user)
        return None if held is None else replace(held, end_s=until_s, waiting=item.action)

    def _reduction(self, item: TimedSpan) -> Iterator[TimedSpan]:
        """The sum over ranks before a STEP: from when the last of its ranks came to it.

        In a program of several updates a REDUCE only begins it. It goes on beside the rank until the STEP of
        that update begins, or as long as a run notes that the rank waited for it.
        """
        previous = self.before(item)
        begin_s = previous.end_s if previous else 0.0
        update = item.action.partition(STEP)[2]
        for total in reversed(self._sums[item.rank]):
            if update and REDUCE in total.action:
                if total.action.endswith(REDUCE + update) and total.end_s <= item.start_s:
                    begun = [i for rank in self._peers(total) for i in self._sums[rank]]
                    came = [i.end_s for i in begun if i.action.endswith(REDUCE + update)]
                    start_s = max(end_s for end_s in came if end_s <= item.start_s)
                    yield replace(total, place=item.place, start_s=start_s, end_s=item.start_s)
                    return
            elif begin_s <= total.start_s and total.end_s <= item.start_s:
                yield self._summed(total, item.place, total.end_s)
                return

    def _summed(self, total: TimedSpan, place: int, end_s: float) -> TimedSpan:
        """A sum over ranks up to `end_s`, from when the last of its ranks came to it."""
        came = [i.end_s for r in self._peers(total) if (i := self._computed[r].until(end_s))]
        start_s = min(max(came, default=total.start_s), end_s)
        return replace(total, place=place, start_s=start_s, end_s=end_s)

    def _peers(self, total: TimedSpan) -> Sequence[int]:
        """The ranks of a REDUCE; all of them for any other sum, such as that of the gradients' norm."""
        return self._partners[total.rank] if REDUCE in total.action else range(len(self.rows))

    def data(self, item: TimedSpan, earlier: TimedSpan) -> bool:
        """Whether an action, or a copy, needs what an earlier one of its rank made."""
        one, other = self._action(item.action), self._action(earlier.action)
        if one is None or other is None or item.repeat != earlier.repeat:
            return False
        same = (one.stage, one.microbatch) == (other.stage, other.microbatch)
        if same and one.kind in ON_RESIDUALS and other.kind in ON_RESIDUALS:
            return ON_RESIDUALS.index(other.kind) < ON_RESIDUALS.index(one.kind)
        return any(made in needs(one, self._flow) for made in produces(other))

    def root(self, item: TimedSpan) -> TimedSpan | None:
        """Follow back until something could have begun earlier but for its rank, or its link, being busy.

        Returns: what its rank or link was busy with; None at the beginning of the step.
        """
        passed: list[TimedSpan] = []
        now: TimedSpan | None = item
        root: TimedSpan | None = None
        while now is not None:
            if now in self._roots:
                root = self._roots[now]
                break
            passed.append(now)
            cause = self.cause(now)
            if cause is not None and self._busy(now, cause):
                root = cause
                break
            now = cause
        # All that was passed has the same root, so that each item is passed once, however many are asked for.
        self._roots.update(dict.fromkeys(passed, root))
        return root

    def _busy(self, item: TimedSpan, cause: TimedSpan) -> bool:
        if item.kind == "transfer":
            own = cause.kind == "compute" and cause.rank == item.to_rank != item.rank
            return own or cause.kind == "transfer"
        if item.kind == "copy":
            placed = (item.action, item.repeat) in self._copies
            return placed and cause.kind in ("compute", "copy") and not self.data(item, cause)
        return item.kind == cause.kind == "compute" and not self.data(item, cause)

    def back(self, item: TimedSpan | None, at_s: float) -> Iterator[tuple[TimedSpan, float, float, bool]]:
        """What led to `item`, which ends at `at_s`: pieces without a hole, the latest first, down to 0.

        Yields: an item, its piece's start and end, and whether that is the item itself; if not, it is time
        between what the item waited for and its start.
        """
        while item is not None:
            start_s = min(item.start_s, at_s)
            if at_s > start_s:
                yield item, start_s, at_s, True
            earlier = self.cause(item)
            # Clocks of ranks may differ: nothing is taken to end after what waited for it has begun.
            end_s = min(earlier.end_s, start_s) if earlier is not None else 0.0
            if start_s > end_s:
                yield item, end_s, start_s, False
            at_s, item = end_s, earlier

    def path(self, item: TimedSpan, at_s: float) -> Iterator[PathStep]:
        """The same as pieces of a critical path."""
        for i, start_s, end_s, itself in self.back(item, at_s):
            yield PathStep(
                kind=i.kind if itself else "overhead",
                rank=i.rank,
                action=i.action,
                start_s=start_s,
                end_s=end_s,
                to_rank=i.to_rank if itself else -1,
                waiting=i.waiting if itself else "",
            )

    def last(self) -> TimedSpan | None:
        """The compute action that ends last; of several, one that took time."""
        ends = [row[-1] for row in self.rows if row]
        return max(ends, key=lambda i: (i.end_s, i.end_s - i.start_s), default=None)
