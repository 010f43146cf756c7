"""pipeoffload: which schedule, how many stages per rank, what leaves them, and what is made again.

PipeOffload (arXiv 2503.01328) leaves that to its user: the largest groups that fit, then uniform repeating
with as many stages offloaded as the link can take. Here each of a list of schedules is planned under the
caps, by name: names say the group (`group`), the stages per rank (`v`), how many of them leave (`offload`),
or that a rank holds what its cap leaves (`fit`, see `fit_caps`), so that a list of names
is all that the search knows of schedules. The plan with the shortest simulated step wins, and its cuts are
moved by that step at last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TypeAlias

from ..ir.errors import InfeasibleError, PlanError, ScheduleError
from ..ir.memory_policy import Treatment
from ..ir.plan import Plan
from ..schedules.language.names import parse_name
from .request import SearchWatch

POLISHES = "dawnpiper"
"""The planner that moves cuts by the simulated step. It is asked with the first names in any case, so that
none of its plans with these is faster than what is chosen."""

FIRST = ("1f1b", "gis_h")

CHUNKS = (2, 4)
"""Stages per rank that are tried."""

ROUNDS = 6
"""Searches of one way to plan, until what it takes under the caps is as it was taken to be."""

CLOSE = 0.03
"""Share of a step by which moving cuts makes a plan faster, at most, as far as the search cares: a schedule
that takes longer than that where memory does not matter is not looked at."""

FAR = 1.5
"""What ranks hold together where all is kept, over what they have: beyond it other cuts are of no use. Orders
with copies are tried even so where nothing else fits."""


@dataclass(frozen=True)
class Try:
    """One way to plan.

    capped: if not, as if devices had memory for everything.  polishes: see `Planner`.
    below_s: see `Request`.
    """

    schedule: str
    planner: str
    treatments: tuple[Treatment, ...] | None
    capped: bool = True
    polishes: bool = False
    below_s: float = inf


MakePlan: TypeAlias = Callable[[Try], Plan]
"""Plans one way; raises as `make_plan`."""


def schedule_names(ranks: int, most_stages: int, *, copies: bool = True) -> tuple[str, ...]:
    """Schedules that are worth a try, by name.

    most_stages: into which the model can be cut.  copies: those that offload, too.

    >>> schedule_names(2, 4, copies=False)
    ('1f1b', 'gis_h', 'zb_h1', 'gis:v=2', 'po:v=2', 'zb_v')
    >>> schedule_names(2, 2)
    ('1f1b', 'zb_h1', '1f1b:offload=1', '1f1b:fit=1')
    """
    several = [v for v in CHUNKS if v * ranks <= most_stages]
    names = ["1f1b", *(["gis_h"] if several else []), "zb_h1"]
    families = ((v, family) for v in several for family in ("gis", "gis_h", "po"))
    names += [f"{family}:v={v}" for v, family in families if (v, family) != (2, "gis_h")]
    names += ["zb_v"] if several else []
    if not copies:
        return tuple(names)
    names += ["1f1b:offload=1", "1f1b:fit=1"]
    for v in several:
        counts = sorted({1, ceil(v / 2), v})
        groups = sorted({ceil(ranks / 2), ranks})
        names += [f"po:v={v},offload={n}" for n in counts]
        names += [f"gis_g:group={g},v={v},offload={n}" for g in groups for n in counts]
        names += [f"po:v={v},fit=1", *(f"gis_g:group={g},v={v},fit=1" for g in groups)]
    return tuple(names)


def tries_of(name: str, treatments: tuple[Treatment, ...] | None, *, keeps: bool = True) -> Iterator[Try]:
    """How a schedule is planned: with every residual kept that it does not offload itself, unless that cannot
    fit (`keeps`), and made again where that may be.  treatments: what the user allows; None for all."""
    again: tuple[Treatment, ...] = ("recompute",)
    if keeps:
        yield _keeping(name, treatments)
    if not parse_name(name).copies and (treatments is None or "recompute" in treatments):
        yield Try(name, "probe", again)


def _keeping(name: str, treatments: tuple[Treatment, ...] | None) -> Try:
    """With every residual kept that the schedule does not offload itself; of those that it does, cheap ones
    are made again instead, unless that is not allowed."""
    alone = parse_name(name).copies and treatments is not None and "recompute" not in treatments
    return Try(name, "exact", ("offload",) if alone else ())


def choose_schedule(
    plan: MakePlan,
    names: Sequence[str],
    caps: Sequence[int],
    *,
    treatments: tuple[Treatment, ...] | None = None,
    fastest: bool = True,
    watch: SearchWatch | None = None,
) -> Plan:
    """The plan with the shortest simulated step of all that keep the caps.

    plan: makes one.  names: of the schedules.  caps: bytes of each rank.  treatments: what the user allows.
    fastest: if not, the first that is found.  watch: told of each that is tried.

    What a schedule takes where memory does not matter is found first, which is quick. In the order of that
    all is tried under the caps, until the next one would be slower even so. Copies are looked at where the
    same order without them is not as fast under the caps as without.
    Raises: InfeasibleError if none fits; PlanError if none can be planned.
    """
    search = _Choice(plan, tuple(caps), treatments, watch, names)
    if not fastest:
        first = [Try(name, POLISHES, treatments) for name in names if name in FIRST]
        for one in (*first, *(one for name in names for one in tries_of(name, treatments))):
            if search.try_(one):
                break
        return search.found()
    search.try_in_order([name for name in names if not parse_name(name).copies])
    search.try_in_order([name for name in names if parse_name(name).copies and search.wants(name)])
    return search.polished()


class _Choice:
    """The best so far, and what each schedule takes where memory does not matter.

    told: the names that the watch was told of.
    """

    def __init__(
        self,
        plan: MakePlan,
        caps: tuple[int, ...],
        treatments: tuple[Treatment, ...] | None,
        watch: SearchWatch | None,
        names: Sequence[str],
    ) -> None:
        self.plan, self.caps, self.treatments = plan, caps, treatments
        self.watch, self.names, self.told = watch, names, set[str]()
        self.free: dict[str, Plan] = {}
        self.kept: set[str] = set()
        """Names that are as fast under the caps as without."""
        self.best: Plan | None = None
        self.by: Try | None = None
        self.first: PlanError | ScheduleError | None = None

    def try_in_order(self, names: Sequence[str]) -> None:
        """All ways of the schedules that may be faster than the best, the most promising first."""
        for name in names:
            self._tell(name)
            try:
                self.free[name] = self.plan(replace(_keeping(name, self.treatments), capped=False))
            except (PlanError, ScheduleError) as error:
                self._note(error)
        for name in sorted(self.free.keys() & set(names), key=lambda name: self.free[name].predicted_step_s):
            if self._is_slower(name):
                break
            self._tell(name)
            self._try_all_of(name)

    def wants(self, name: str) -> bool:
        """Whether copies in an order may be of use; a yes where the order without is not asked for."""
        plain = parse_name(name).plain(len(self.caps))
        if plain not in self.names:
            return True
        return plain not in self.kept and plain in self.free and not self._is_slower(plain)

    def _is_slower(self, name: str) -> bool:
        """Whether a schedule cannot be faster than the best."""
        least_s = (1 - CLOSE) * self.free[name].predicted_step_s
        return self.best is not None and least_s >= self.best.predicted_step_s

    def _try_all_of(self, name: str) -> None:
        """Under the caps; what is as fast as without them is all that is looked for."""
        free = self.free[name]
        near = sum(free.peaks) <= FAR * sum(self.caps) or (self.best is None and parse_name(name).copies)
        near = (
            near or parse_name(name).fits_caps
        )  # which holds all that is copied where memory does not matter
        for one in tries_of(name, self.treatments, keeps=near):
            if name in self.kept and "recompute" in (one.treatments or ()):
                return
            found = self.try_(one)
            if found is not None and found.predicted_step_s <= free.predicted_step_s:
                self.kept.add(name)

    def _tell(self, name: str) -> None:
        self.told.add(name)
        if self.watch is not None:
            best = None if self.best is None else (self.best.schedule, self.best.predicted_step_s)
            self.watch.tried(name, len(self.told), len(self.names), best)

    def try_(self, one: Try) -> Plan | None:
        """One way to plan, in full by `POLISHES`, else only as far as it may be about as fast as the best.

        Returns its plan, if there is one.
        """
        below_s = inf
        if self.best is not None and one.planner != POLISHES:
            below_s = (1 + CLOSE) * self.best.predicted_step_s
        try:
            found = self.plan(replace(one, below_s=below_s))
        except (PlanError, ScheduleError) as error:
            self._note(error)
            return None
        if self.best is None or found.predicted_step_s < self.best.predicted_step_s:
            self.best, self.by = found, one
        return found

    def polished(self) -> Plan:
        """The best plan, its cuts moved by the simulated step. Raises: see `choose_schedule`."""
        for name in FIRST:
            if name in self.free and not self._is_slower(name):
                self._tell(name)
                self.try_(Try(name, POLISHES, self.treatments))
        best = self.found()
        if self.by is not None and self.by.planner != POLISHES:
            self.try_(replace(self.by, polishes=True))
        return self.best or best

    def found(self) -> Plan:
        """The best plan so far. Raises: see `choose_schedule`."""
        if self.best is None:
            raise self.first or PlanError("no schedule to choose from", hint="name at least one")
        return self.best

    def _note(self, error: PlanError | ScheduleError) -> None:
        """Keep the first error, or rather the first that says that nothing fits."""
        refused = isinstance(error, InfeasibleError)
        if self.first is None or (refused and not isinstance(self.first, InfeasibleError)):
            self.first = error
