"""Weight policies: which version of its weights a stage uses for a micro-batch, and how many it keeps.

    flush   one version: all micro-batches use it, and the update comes after the last backward
    stash   PipeDream: a forward uses the newest version its stage has made, its backward that copy again
            (arXiv 1806.03377, section 3.3)
    2bw     PipeDream-2BW: micro-batch k uses version max(k // every - 1, 0) on all stages, k from 0, so that
            two are enough (arXiv 2006.09503, section 3.1)

A policy is one entry of the table that checks, planners, commands and the runtime read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import ScheduleError

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
"""The one table of policies; `register_weight_policy` adds to it."""


def register_weight_policy(name: str, policy: WeightPolicy) -> None:
    """Make a policy known by a name. Raises: ScheduleError if the name is taken.

    >>> from unittest.mock import patch
    >>> slow = WeightPolicy(about="", version=lambda k, every, newest: 0, copies=lambda in_flight: 1)
    >>> with patch.dict(WEIGHT_POLICIES):
    ...     register_weight_policy("frozen", slow)
    ...     Updates(policy="frozen").rule is slow
    True
    """
    if name in WEIGHT_POLICIES:
        raise ScheduleError(f"a weight policy named {name!r} exists already", hint="choose another name")
    WEIGHT_POLICIES[name] = policy


@dataclass(frozen=True, kw_only=True)
class Updates:
    """When the weights of a schedule change, and how many versions of them are kept.

    policy: its name.  every: micro-batches per update; one that flushes has all of the schedule, whatever
        stands here.
    kept: versions that each stage keeps, the newest and those before it; None for the policy's own number.
    Raises: ScheduleError if there is no such policy, or a number is not positive.
    """

    policy: str = FLUSH
    every: int = 1
    kept: int | None = None

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

    @property
    def rule(self) -> WeightPolicy:
        return WEIGHT_POLICIES[self.policy]

    @property
    def limit(self) -> int | None:
        """Versions that each stage keeps, None for no limit."""
        return self.rule.kept if self.kept is None else self.kept
