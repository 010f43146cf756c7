"""What a step takes where a rank keeps few receives posted, as the simulator and the runtime have it.

The list scheduler hands a message over as soon as its link is free, however far ahead of its user:

    rank 0   |0F0|0F1|0F2|0F3|                  0F2's message may move only when that of 0F0 has been taken,
    rank 1         busy        |1F0|1F1|...     with two receives posted ahead

Orders that differ little by the scheduler's times can differ the other way round by these.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .problem import Outcome, SchedulingProblem

RECEIVES_AHEAD = 2
"""Receives that a rank keeps posted for each rank that sends to it, as in `simulator.simulate`."""

MOST_ACTIONS = 20_000
"""Of a step that is timed so: this is plain Python, 5 microseconds an action."""


@dataclass
class _Channel:
    """Messages from one rank to another, in the order in which they are sent; seconds.

    target: the rank that receives.  delays: of all messages.  sent: of those that are.  arrived: of those
    that have moved.  posted: when their receives were, as far as they are.  received: how many are taken.
    """

    target: int
    delays: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    posted: list[float] = field(default_factory=lambda: [0.0] * RECEIVES_AHEAD)
    received: int = 0

    def post(self, count: int, clock: float) -> None:
        """Post receives until there are so many, and move what then can."""
        self.posted += [clock] * (count - len(self.posted))
        self.move()

    def move(self) -> None:
        """Move all messages that are sent and whose receives are posted, one after the other."""
        while len(self.arrived) < min(len(self.sent), len(self.posted)):
            at = len(self.arrived)
            free = self.arrived[-1] if self.arrived else 0.0
            self.arrived.append(max(self.sent[at], self.posted[at], free) + self.delays[at])


@dataclass
class _Rank:
    """A rank on its way through its row; seconds.

    row: (stream, micro-batch).  position: of the next action.  taken: how many of its messages are taken.
    """

    row: list[tuple[int, int]]
    position: int = 0
    taken: int = 0
    clock: float = 0.0
    begin: float = 0.0


@dataclass
class _Messages:
    """Per action (stream, micro-batch) the channels of what it sends, and of what it awaits with the places
    of these messages."""

    sends: dict[tuple[int, int], list[_Channel]]
    awaits: dict[tuple[int, int], list[tuple[_Channel, int]]]


def step_with_posted_receives(task: SchedulingProblem, outcome: Outcome) -> tuple[float, float] | None:
    """The step, and the longest span of a rank, of rows that the list scheduler made, in seconds.

    None where it is not looked at: many actions, pairs, stages on several ranks, inserted operations; or no
    message takes time. Otherwise both are at least those of the outcome.
    """
    streams = task.streams
    late = any(seconds > 0 for stream in streams for _, seconds in stream.feeds)
    plain = not outcome.pairs and not any(stream.unit or stream.around for stream in streams)
    if not (late and plain) or sum(map(len, outcome.rows)) > MOST_ACTIONS:
        return None
    index = {(stream.stage, stream.kind): i for i, stream in enumerate(streams)}
    if any((action.stage, action.kind) not in index for row in outcome.rows for action in row):
        return None
    ranks = [_Rank([(index[a.stage, a.kind], a.microbatch) for a in row]) for row in outcome.rows]
    messages = _messages(task, ranks)
    waiting = list(range(task.ranks))
    while waiting:
        waiting += _go_on(task, ranks[waiting.pop()], messages)
    assert all(rank.position == len(rank.row) for rank in ranks), "rows that block"
    return max(rank.clock for rank in ranks), max(rank.clock - rank.begin for rank in ranks)


def _messages(task: SchedulingProblem, ranks: list[_Rank]) -> _Messages:
    channels: dict[tuple[int, int], _Channel] = {}
    messages = _Messages(defaultdict(list), defaultdict(list))
    for number, rank in enumerate(ranks):
        for stream, b in rank.row:
            for user, seconds in task.streams[stream].feeds:
                target = task.streams[user].rank
                if target == number:
                    continue
                channel = channels.setdefault((number, target), _Channel(target))
                messages.sends[stream, b].append(channel)
                messages.awaits[user, b].append((channel, len(channel.delays)))
                channel.delays.append(seconds)
    return messages


def _go_on(task: SchedulingProblem, rank: _Rank, messages: _Messages) -> set[int]:
    """Run a rank until it must wait or ends. Returns the ranks whose messages may have moved."""
    others: set[int] = set()
    while rank.position < len(rank.row):
        action = rank.row[rank.position]
        for channel, place in messages.awaits[action][rank.taken :]:
            channel.post(place + 1, rank.clock)
            if place >= len(channel.arrived):
                return others
            rank.clock = max(rank.clock, channel.arrived[place])
            rank.taken += 1
            channel.received += 1
            channel.post(channel.received + RECEIVES_AHEAD, rank.clock)
        if rank.position == 0:
            rank.begin = rank.clock
        rank.clock += task.streams[action[0]].seconds
        for channel in messages.sends[action]:
            channel.sent.append(rank.clock)
            channel.move()
            others.add(channel.target)
        rank.position, rank.taken = rank.position + 1, 0
    return others
