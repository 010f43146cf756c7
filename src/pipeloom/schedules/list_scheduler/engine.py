"""The list scheduler: an event-driven run of all ranks that decides, at each moment, what each does next.

Every (stage, kind) is a stream: its actions run in a fixed order of micro-batches, so a rank only ever
chooses between the heads of its few streams. An action is announced to its users when it *starts*, as its
end is known then; so a rank sees what will arrive soon, and a filler (W) runs only where it fits the gap.

Time is near linear: each action costs one event, and a look at the heads of the rank's streams. What goes on
inside is in `loop`; here it is started, and pairs and predicates, which ask Python functions, are run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from ...ir.action import Action
from ...ir.columns import Floats, Rows
from ...ir.costs import pair_seconds
from ...ir.dependencies import needs, produces
from ...ir.errors import DeadlockError
from ...ir.schedule import Pair
from ..language.recipe import Recipe
from . import loop
from .loop import TOO_LONG
from .tables import EPS, RecipeTables, SchedulerState, Tables, as_lists


@dataclass(frozen=True, kw_only=True)
class ScheduledRecipe:
    """What a recipe gives for a shape. step_s: until the last rank ends.  span_s: longest first-to-last time
    of a rank.  peak: most memory of each rank.  starts: of each rank when its actions begin.  pairs:
    neighbours that run as one unit."""

    recipe: Recipe
    rows: Sequence[tuple[Action, ...]]
    step_s: float
    span_s: float
    peak: tuple[float, ...]
    starts: tuple[Floats, ...] = field(repr=False, compare=False)
    pairs: tuple[Pair, ...] = ()


def run(problem: RecipeTables, within_s: float = inf) -> ScheduledRecipe | None:
    """Order everything; None as soon as it is certain that the step takes longer than `within_s`.

    Raises: DeadlockError if the limits leave no rank anything that it may run.
    """
    recipe, s = problem.recipe, problem.new_state()
    # A pair may take less time than its two actions: then what is left is not known.
    t = problem.tables._replace(within=inf if recipe.together is not None else within_s + EPS)
    rules = _Rules(problem) if recipe.together is not None or recipe.before is not None else None
    order_all = loop.order_all.form(len(t.order)) if rules is None else rules.order_all
    if rules is not None or order_all is loop.order_all.interpreted:
        t, s = as_lists(t), as_lists(s)
    look = loop.look.interpreted
    for index in range(len(t.rank)):
        look(t, s, index)
    if order_all(t, s, problem.shape.ranks) == TOO_LONG:
        return None
    if sum(s.next) < len(t.order):
        raise _stuck(problem, t, s)
    starts = np.split(np.asarray(s.start), problem.tables.row_at[1:-1])
    ends = list(map(float, s.free))
    spans = [end - float(start[0]) for end, start in zip(ends, starts, strict=True) if len(start)]
    return ScheduledRecipe(
        recipe=recipe,
        rows=Rows(problem.columns(s)),
        step_s=max(ends),
        span_s=max(spans, default=0.0),
        peak=tuple(map(float, s.peak)),
        starts=tuple(starts),
        pairs=() if rules is None else tuple(rules.pairs),
    )


class _Rules:
    """What functions of the user decide: which actions go in pairs, and which before others.

    A pair is a unit like the actions of a stage on several ranks, but on one rank, and made where the loop
    comes to it: whether two actions go together may depend on any of their numbers.
    """

    def __init__(self, problem: RecipeTables) -> None:
        self.problem, self.recipe, self.streams = problem, problem.recipe, problem.streams
        stages = problem.tables.stage.tolist()
        self.stream_of = {pair: i for i, pair in enumerate(zip(stages, self.streams.kinds, strict=True))}
        self.second_of: dict[Action, Action] = {}
        together, flow = self.recipe.together, problem.shape.flow
        for row in problem.listed or ():
            if together is None:
                break
            taken = False
            for a, b in zip(row, row[1:], strict=False):
                alone = a.stage not in flow.shards and b.stage not in flow.shards
                taken = not taken and alone and together(a, b)
                # not if one of them needs the other
                taken = taken and set(produces(a)).isdisjoint(needs(b, flow))
                if taken:
                    self.second_of[a] = b
        self.pairs: list[Pair] = []
        holds_back = self.recipe.before is not None or self.second_of
        hold_back = self._hold_back if holds_back else loop.hold_back.interpreted
        self.order_all = loop.order_all.calling(hold_back=hold_back, begin_unit=self._begin_unit)

    def _hold_back(self, t: Tables, s: SchedulerState, rank: int) -> None:
        for index in _own(t, rank):
            if s.batch[index] >= 0 and not s.fills[index]:
                others = (self._head(s, i) for i in _own(t, rank) if i != index and s.batch[i] >= 0)
                before, action = self.recipe.before, self._head(s, index)
                late = before is not None and any(before(other, action) for other in others)
                s.hold[index] = inf if late else self._partner_ready(t, s, index)

    def _second(self, s: SchedulerState, index: int) -> tuple[int, int] | None:
        """Stream and micro-batch of what goes with the next action of a stream, in fixed rows."""
        action = self.second_of.get(self._head(s, index)) if self.second_of else None
        return None if action is None else (self.stream_of[action.stage, action.kind], action.microbatch)

    def _partner_ready(self, t: Tables, s: SchedulerState, index: int) -> float:
        """When the other action of a fixed pair has what it needs; 0 without one."""
        second = self._second(s, index)
        if second is None:
            return 0.0
        other, b = second
        full = t.opens[other] and not loop.may_open.interpreted(t, s, other, b)
        place = other * t.size + b
        return inf if full or s.missing[place] else float(s.arrival[place])

    def _begin_unit(self, t: Tables, s: SchedulerState, index: int, now: float) -> None:
        pair = [index]
        fixed = self._second(s, index)
        if fixed is not None:
            pair = [index, fixed[0]]
        elif self.recipe.together is not None and self.problem.listed is None and not s.fills[index]:
            pair = self._companions(t, s, index, now)
        if len(pair) == 1:
            loop.begin_unit.interpreted(t, s, index, now)
            return
        first, second = (self._head(s, i) for i in pair)
        self.pairs.append((first, second))
        places = [i * t.size + s.batch[i] for i in pair] if len(t.before) else []
        before, after = (sum(side[place] for place in places) for side in (t.before, t.after))
        end = now + before + pair_seconds(self.problem.shape.costs, (first, second))
        for member in pair:
            loop.begin.interpreted(t, s, member, now, end, end + after)

    def _companions(self, t: Tables, s: SchedulerState, index: int, now: float) -> list[int]:
        """A stream and one that may run with it now, in the order in which they run; or it alone."""
        together = self.recipe.together
        assert together is not None
        action = self._head(s, index)
        for other in _own(t, t.rank[index]):
            if any(t.unit_at[i] < t.unit_at[i + 1] for i in (index, other)):
                continue
            if other == index or s.ready[other] > now + EPS or (t.opens[other] and t.opens[index]):
                continue
            if t.opens[other] and not loop.may_open.interpreted(t, s, other, s.batch[other]):
                continue
            if together(action, self._head(s, other)):
                return [index, other]
            if together(self._head(s, other), action):
                return [other, index]
        return [index]

    def _head(self, s: SchedulerState, index: int) -> Action:
        return self.streams.action(index, s.batch[index])


def _own(t: Tables, rank: int) -> Sequence[int]:
    return t.own[t.own_at[rank] : t.own_at[rank + 1]]  # type: ignore[return-value]


def _stuck(problem: RecipeTables, t: Tables, s: SchedulerState) -> DeadlockError:
    full, waits = zip(*_waits(problem, t, s), strict=True)
    if any(full):
        hint = (
            "limit each chunk on its own (in_flight_stage), so the last one has room, or order by a clock=, "
            "which keeps room for the forwards that let memory go"
        )
        if problem.recipe.clock is not None:
            hint = "the clock itself passes the limits: give it a longer period, or allow more"
        return DeadlockError("the limits block this order: " + "; ".join(waits[:16]), hint=hint)
    at_fault = "the rows" if problem.listed is not None else "what before= holds back"
    return DeadlockError("no rank can move: " + "; ".join(waits[:16]), hint=f"reorder {at_fault}")


def _waits(problem: RecipeTables, t: Tables, s: SchedulerState) -> Iterator[tuple[bool, str]]:
    """Per rank that has not run all: whether a limit holds it up, and in words what does."""
    action_of, before = problem.streams.action, problem.recipe.before
    for rank in range(problem.shape.ranks):
        own = _own(t, rank)
        heads = [int(i) for i in own if s.batch[i] >= 0]
        at = t.line_at[rank] + s.head[rank]
        if problem.listed is not None and at < t.line_at[rank + 1]:
            heads = [int(t.line[at])]
        heads.sort(key=lambda i: s.missing[i * t.size + s.batch[i]] > 0)  # those at hand first
        at_hand = (i for i in heads if s.missing[i * t.size + s.batch[i]] == 0 and t.opens[i])
        full = [i for i in at_hand if not loop.may_open.interpreted(t, s, i, s.batch[i])]
        if full:
            action = action_of(full[0], s.batch[full[0]])
            opened = f"{s.opened[rank]} micro-batches open"
            yield True, f"rank {rank} has {action} at hand but its limit is full ({opened})"
        elif heads:
            index, b = heads[0], int(s.batch[heads[0]])
            needed = [
                str(action_of(i, b))
                for i in range(len(t.rank))
                if index in t.feeds[t.feeds_at[i] : t.feeds_at[i + 1]]
                and b not in list(t.order[t.order_at[i] : t.order_at[i] + s.next[i]])
            ] or [str(action_of(i, b)) for i in t.unit[t.unit_at[index] : t.unit_at[index + 1]]]
            action = action_of(index, b)
            others = (action_of(i, s.batch[i]) for i in own if s.batch[i] >= 0 and i != index)
            first = [str(other) for other in others if before is not None and before(other, action)]
            if needed:
                what = f"needs {needed[0]}"
            elif first:
                what = f"is held back by {first[0]}, which before= puts first"
            else:
                what = "is held back by the rows, in which another action stands first"
            yield False, f"rank {rank} at {action} {what}"
