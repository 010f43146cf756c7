"""Explanation: why ranks were idle in a step, and what its length came from. Made of any timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Reason: TypeAlias = Literal[
    "warm-up", "fill", "imbalance", "order", "transfer", "link", "copy", "reduce", "overhead", "drain"
]

REASONS: Mapping[Reason, str] = {
    "warm-up": "before a rank's first action: no micro-batch has reached it yet",
    "fill": "the micro-batch it waits for is on its way, and no rank is too busy to take it on at once",
    "imbalance": "it waits for a rank that has more work in a step",
    "order": "it waits for a rank that runs other actions first and has no more work in a step",
    "transfer": "what it waits for has been computed, and is on its way between ranks",
    "link": "what it waits for waits itself for a link that ranks share, and that carries something else",
    "copy": "it waits for a copy from or to host memory",
    "reduce": "it waits for other ranks, or for the sum over ranks, before the optimizer",
    "overhead": "all that it needs is there, and the action has not begun",
    "drain": "after a rank's last action: other ranks still work",
}
"""Every reason with its meaning. The idle time of a step is the sum over them, nothing left over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Time in which a rank computes nothing, with one reason. Times in seconds from the start of the step.

    A wait can have several reasons one after the other; each is an Idle of its own.

    action: the compute action that ends the wait; empty after the last one.
    waits_for, on_rank: the action, and its rank, whose result that action waits for; where nothing is
        waited for: empty, and -1.
    root, root_rank: what it comes from in the end, found by following back from `waits_for` whatever was
        itself waiting: an action whose rank was busy, or a message or copy whose link was; empty, and -1,
        where there is none.
    waiting: of a "link", the message or copy that waits for it; `root` is what holds it.
    """

    rank: int
    start_s: float
    end_s: float
    reason: Reason
    action: str = ""
    waits_for: str = ""
    on_rank: int = -1
    root: str = ""
    root_rank: int = -1
    waiting: str = ""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """One piece of the critical path. Times in seconds from the start of the step.

    kind: "compute"; "transfer", with the sender in `rank` and the receiver in `to_rank`; "reduce"; "copy";
        or "overhead", where nothing that is known of held the next piece up.
    waiting: of a message or copy that holds a shared link, what waits for it; the piece ends when the link
        is free.
    """

    kind: Literal["compute", "transfer", "reduce", "copy", "overhead"]
    rank: int
    action: str
    start_s: float
    end_s: float
    to_rank: int = -1
    waiting: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One step of all ranks, explained.

    idle: all idle time, by rank and then by time; with the time computing it makes ranks x step_s.
    path: pieces without a hole from 0 to step_s, each waiting for the one before it: only by making one
        of them shorter does the step get shorter.
    """

    source: str
    ranks: int
    step_s: float
    idle: tuple[Idle, ...]
    path: tuple[PathStep, ...]

    @property
    def idle_s(self) -> float:
        """Rank-seconds without computing."""
        return sum(i.duration_s for i in self.idle)

    @property
    def bubble(self) -> float:
        """Idle share of all rank-time, until the last rank ends."""
        return self.idle_s / (self.ranks * self.step_s) if self.step_s else 0.0

    @property
    def span_bubble(self) -> float:
        """Idle share of the longest time from a rank's first action to its last, over all ranks."""
        outside = [0.0] * self.ranks
        for i in self.idle:
            if i.reason in ("warm-up", "drain"):
                outside[i.rank] += i.duration_s
        span_s = self.step_s - min(outside, default=0.0)
        busy_s = self.ranks * self.step_s - self.idle_s
        return 1.0 - busy_s / (self.ranks * span_s) if span_s else 0.0

    @property
    def by_reason(self) -> dict[Reason, float]:
        """Rank-seconds of each reason that occurs, largest first."""
        seconds: dict[Reason, float] = {}
        for i in self.idle:
            seconds[i.reason] = seconds.get(i.reason, 0.0) + i.duration_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))
