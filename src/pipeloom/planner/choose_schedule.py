"""pipeoffload: which schedule, how many stages per rank, what leaves them, and what is made again.

PipeOffload (arXiv 2503.01328) leaves that to its user: the largest groups that fit, then uniform repeating
with as many stages offloaded as the link can take. Here each of a list of schedules is planned under the
caps, by name: names say the group (`group`), the stages per rank (`v`), how many of them leave (`offload`),
or how much a rank may hold (`limit`), so that a list of names is all that the search knows of schedules. The
plan with the shortest simulated step wins, and its cuts are moved by that step at last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from ..ir.errors import InfeasibleError, PlanError, ScheduleError
from ..ir.memory_policy import Treatment
from ..ir.plan import Plan

POLISHES = "dawnpiper"
"""The planner that moves cuts by the simulated step. It is asked with the first names in any case, so that
none of its plans with these is faster than what is chosen."""

FIRST = ("1f1b", "gis_h")

CHUNKS = (2, 4)
"""Stages per rank that are tried."""

LIMITS = (0.75, 0.5, 0.25)
"""Shares of what a rank holds without copies to which it is limited."""


class MakePlan(Protocol):
    """Plans with one schedule: see `make_plan`."""

    def __call__(self, *, schedule: str, strategy: str, treatments: tuple[Treatment, ...] | None) -> Plan: ...


@dataclass(frozen=True)
class Try:
    """One way to plan."""

    schedule: str
    strategy: str
    treatments: tuple[Treatment, ...] | None


def schedule_names(ranks: int, most_stages: int, *, copies: bool = True) -> tuple[str, ...]:
    """Schedules that are worth a try, by name.

    most_stages: into which the model can be cut.  copies: those that offload, too.

    >>> schedule_names(2, 4, copies=False)
    ('1f1b', 'gis_h', 'zb_h1', 'gis:v=2', 'gis_h:v=2', 'po:v=2', 'zb_v')
    >>> schedule_names(2, 2)
    ('1f1b', 'zb_h1', '1f1b:offload=1', '1f1b:limit=1.5')
    """
    several = [v for v in CHUNKS if v * ranks <= most_stages]
    names = ["1f1b", *(["gis_h"] if several else []), "zb_h1"]
    names += [f"{family}:v={v}" for v in several for family in ("gis", "gis_h", "po")]
    names += ["zb_v"] if several else []
    if not copies:
        return tuple(names)
    names += ["1f1b:offload=1"]
    names += [f"1f1b:limit={share * ranks:g}" for share in LIMITS if share * ranks >= 1.5]
    for v in several:
        counts = sorted({1, ceil(v / 2), v})
        groups = sorted({ceil(ranks / 2), ranks})
        names += [f"po:v={v},offload={n}" for n in counts]
        names += [f"gis_g:group={g},v={v},offload={n}" for g in groups for n in counts]
        names += [f"po:v={v},limit={share * ranks * (v + 1) / 2:g}" for share in LIMITS]
    return tuple(names)


def tries_of(names: Sequence[str], treatments: tuple[Treatment, ...] | None) -> Iterator[Try]:
    """How each schedule is planned: with every residual kept that it does not offload itself, and made again
    where that may be.  treatments: what the user allows; None for all."""
    again: tuple[Treatment, ...] = ("recompute",)
    for name in names:
        if name in FIRST:
            yield Try(name, POLISHES, treatments)
        yield Try(name, "exact", ())
        if not _copies(name) and (treatments is None or "recompute" in treatments):
            yield Try(name, "probe", again)


def choose_schedule(
    plan: MakePlan,
    names: Sequence[str],
    *,
    treatments: tuple[Treatment, ...] | None = None,
    fastest: bool = True,
) -> Plan:
    """The plan with the shortest simulated step of all that keep the caps.

    plan: makes one.  names: of the schedules.  treatments: what the user allows.  fastest: if not, the first.
    Raises: InfeasibleError, that of the first schedule, if none fits; PlanError if none can be planned.
    """
    best: Plan | None = None
    by: Try | None = None
    first: PlanError | ScheduleError | None = None
    for one in tries_of(names, treatments):
        found = _plan(plan, one)
        if not isinstance(found, Plan):
            refused = isinstance(found, InfeasibleError)
            first = found if first is None or (refused and not isinstance(first, InfeasibleError)) else first
            continue
        if best is None or found.predicted_step_s < best.predicted_step_s:
            best, by = found, one
        if not fastest:
            return best
    if best is None or by is None:
        raise first or PlanError("no schedule to choose from", hint="name at least one")
    if by.strategy != POLISHES:
        polished = _plan(plan, Try(by.schedule, POLISHES, by.treatments))
        if isinstance(polished, Plan) and polished.predicted_step_s < best.predicted_step_s:
            best = polished
    return best


def _plan(plan: MakePlan, one: Try) -> Plan | PlanError | ScheduleError:
    """The plan, or why there is none."""
    try:
        return plan(schedule=one.schedule, strategy=one.strategy, treatments=one.treatments)
    except (PlanError, ScheduleError) as error:
        return error


def _copies(name: str) -> bool:
    return "offload=" in name or "limit=" in name
