"""A weight policy says which version of its weights a stage uses for a micro-batch, and how many it keeps:

    flush   one version: all micro-batches use it, and the update comes after the last backward
    stash   PipeDream: a forward uses the newest version its stage has made, its backward that copy again
            (arXiv 1806.03377, section 3.3)
    2bw     PipeDream-2BW: micro-batch k uses version max(k // every - 1, 0) on all stages, k from 0, so that
            two are enough (arXiv 2006.09503, section 3.1)

A policy is one entry of the table that checks, planners, commands and the runtime read.

Without a flush, two things soften the delay. The first `flushed` updates may be made with a flush, and later
ones may be corrected. With u for what the optimizer adds and a for what the update before really added:

    W(b + 1) = W(b) + u + correction * (u - a),    a = W(b) - W(b - 1)

The version before the newest is kept anyway, and its buffer takes the new one. So this needs no memory: the
buffer first takes a mean of both versions, which the optimizer updates in place.

    Y        = (W(b) + correction * W(b - 1)) / (1 + correction)
    V        = optimizer(Y) = Y + u
    W(b + 1) = V + correction * (V - W(b))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import ScheduleError, shown

FLUSH = "flush"
"""The policy of a schedule and of a plan unless they say otherwise."""


@dataclass(frozen=True, kw_only=True)
class WeightPolicy:
    """One way to update weights.

    about: a few words for the help of commands, after "How weights are updated:".
    flushes: an update comes after the last backward of a step, so there is one per schedule.
    version: number of a micro-batch, micro-batches per update, newest version that the stage has made -> the
        version that the micro-batch uses. Versions count from 0.
    copies: most micro-batches in flight, a number or an array -> copies of a stage's parameters that a
        planner counts, the one that is trained included.
    kept: versions that a stage keeps unless told otherwise; None for as many as it needs.
    """

    about: str
    version: Callable[[int, int, int], int]
    copies: Callable[[Any], Any]
    flushes: bool = False
    kept: int | None = None


WEIGHT_POLICIES: dict[str, WeightPolicy] = {
    FLUSH: WeightPolicy(
        about="once all backwards are done",
        version=lambda microbatch, every, newest: newest,
        copies=lambda in_flight: 1,
        flushes=True,
    ),
    "stash": WeightPolicy(
        about="as in PipeDream",
        version=lambda microbatch, every, newest: newest,
        copies=lambda in_flight: in_flight,
    ),
    "2bw": WeightPolicy(
        about="as in PipeDream-2BW",
        version=lambda microbatch, every, newest: max(microbatch // every - 1, 0),
        copies=lambda in_flight: 2,
        kept=2,
    ),
}
"""The one table of policies: another one is a further entry."""


@dataclass(frozen=True, kw_only=True)
class Updates:
    """When the weights of a schedule change, and how many versions of them are kept.

    policy: its name.  every: micro-batches per update; one that flushes has all of the schedule, whatever
        stands here.
    kept: versions that each stage keeps, the newest and those before it; None for the policy's own number.
    flushed: updates from the start of training that are made with a flush.
    correction: of later ones, see the module. A stage that keeps one version has no delay, and none of this.
    """

    policy: str = FLUSH
    every: int = 1
    kept: int | None = None
    flushed: int = 0
    correction: float = 0.0

    def __post_init__(self) -> None:
        if self.policy not in WEIGHT_POLICIES:
            *names, last = WEIGHT_POLICIES
            raise ScheduleError(
                f"weights are updated by policy {self.policy!r}", hint=f"use {', '.join(names)} or {last}"
            )
        if self.every < 1 or (self.kept is not None and self.kept < 1):
            raise ScheduleError(
                f"an update every {self.every} micro-batches, with {self.kept} versions kept",
                hint="both are at least 1",
            )
        if not 0 <= self.correction < 1:
            raise ScheduleError(
                f"each update is extrapolated by {shown(self.correction)} of the change before it, which "
                "grows without end",
                hint="let delay_correction be from 0 to below 1",
            )

    @property
    def rule(self) -> WeightPolicy:
        return WEIGHT_POLICIES[self.policy]

    @property
    def limit(self) -> int | None:
        """Versions that each stage keeps, None for no limit."""
        return self.rule.kept if self.kept is None else self.kept

    def version(self, microbatch: int, newest: int) -> int:
        """The version that a micro-batch, numbered from the start of training, uses on a stage."""
        if microbatch < self.flushed * self.every:
            return newest
        return self.rule.version(microbatch, self.every, newest)
