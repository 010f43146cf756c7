"""Every schedule of the library that fits the stages, their ranks and the limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...ir.action import Action, B, F, I, Kind, W
from ...ir.columns import Bools, Longs
from ...ir.errors import ScheduleError
from ...ir.kernels import kernel
from ...ir.schedule import Schedule
from ..language.placements import both_ways, loop, wave
from ..registry import FAMILIES, build, entry
from .orders import Found, OrderCandidate, Round, fits, timed
from .problem import SearchProblem, Units

LARGE = 3000
"""Actions of a step from which a schedule is built once, and only where it is meant to run."""

PAIRED = ("dualpipe", "dualpipev")


def library_orders(task: Round) -> Iterator[Found]:
    if not task.problem.caps:
        for name in fitting(task.problem):
            yield Found(candidate=without_limits(task.problem, name), evaluations=1)
        return
    for name, known in task.without_limits.items():
        if task.problem.entries <= LARGE or not fits(known, task.problem.arrays.cap):
            yield Found(candidate=within_limits(task.problem, name), evaluations=1)


def fitting(problem: SearchProblem) -> list[str]:
    """Names of schedules whose placement may be that of the problem; of large problems, whose placement it
    is, and which are not made of pairs. None that copies residuals: copies are not searched."""
    chunks, ranks, placement = problem.shape.chunks, problem.ranks, problem.placed[1]
    meant = {
        "line": placement if chunks == 1 else (),
        "loop": loop(ranks, chunks),
        "wave": wave(ranks, chunks),
        "both ways": both_ways(ranks) if len(problem.parts) == 2 else (),
    }
    large = problem.entries > LARGE
    names = []
    for name in FAMILIES:
        known = entry(name)
        several = known.place in ("loop", "wave", "both ways")
        fits_place = not several or (chunks > 1 and not problem.placed[0].shards)
        if large and (placement != meant.get(known.place, placement) or name in PAIRED):
            continue
        if known.lacks == "" and known.offload is None and name != "forward_only" and fits_place:
            names.append(name)
    return names


def without_limits(problem: SearchProblem, name: str) -> OrderCandidate | None:
    if not all(stage.split for stage in problem.stages):
        # Whether it splits a backward that is whole one micro-batch tells as well as all.
        made = _schedule(replace(problem, microbatches=1), name, limited=False)
        for action in (action for row in made.rows for action in row) if made is not None else ():
            if action.kind in (I, W) and not problem.stages[problem.origin(action.stage)].split:
                return None
    return _built(problem, name, limited=False)


def within_limits(problem: SearchProblem, name: str) -> OrderCandidate | None:
    return None if entry(name).recipe is None else _built(problem, name, limited=True)


def _built(problem: SearchProblem, name: str, *, limited: bool) -> OrderCandidate | None:
    schedule = _schedule(problem, name, limited=limited)
    order = None if schedule is None else order_of_rows(problem, schedule.rows)
    if order is None:
        return None
    found = timed(problem, order, f"library: {name}")
    return found if fits(found, problem.arrays.cap) else None


def _schedule(problem: SearchProblem, name: str, *, limited: bool) -> Schedule | None:
    graph, placement = problem.placed
    shape = problem.shape
    try:
        return build(
            name,
            graph,
            placement,
            problem.microbatches,
            costs=shape.costs,
            transfer_s=shape.transfer_s,
            limit_bytes=shape.limit_bytes if limited else None,
            shortest=problem.shortest,
        )
    except ScheduleError:
        return None


def order_of_rows(problem: SearchProblem, rows: Sequence[Sequence[Action]]) -> np.ndarray | None:
    """Rows as an order of units; None where they have something else, split a backward that is whole, or hold
    more than the limits.

    A whole backward of a stage that may split it is I and right behind it W: never later than the two as one.
    Operations go right behind their anchors, on their rank.
    """
    t, own = problem.arrays, []
    for rank, row in enumerate(rows):
        begins = _begins(problem, rank)
        try:
            entries = [base + a.microbatch for a in row for base in begins[a.stage, a.kind]]
        except KeyError:
            return None
        own.append(np.array(entries, np.int64))
        held = np.cumsum(t.memory[own[-1] // problem.microbatches])
        if len(held) and held.max() > t.cap[rank]:
            return None
    state = Merge(
        rows=np.concatenate(own),
        first=np.cumsum([0, *map(len, own)]),
        at=np.zeros(len(own), np.int64),
        done=np.zeros(problem.entries, np.bool_),
        order=np.zeros(problem.entries, np.int64),
    )
    return state.order if merge(t, state) == problem.entries else None


def _begins(problem: SearchProblem, rank: int) -> dict[tuple[int, Kind], list[int]]:
    """(stage of `placed`, kind of action) -> the entries of micro-batch 0 that begin with it on a rank."""
    m, units = problem.microbatches, problem.units
    unit_of = {(u.stage, u.kind): i for i, u in enumerate(units) if rank in u.ranks}
    behind: dict[int, list[int]] = {}
    for i, u in enumerate(units):
        if u.kind not in (F, B, I, W):
            (anchor,) = problem.needs[i]
            behind.setdefault(anchor, []).append(i)
    found: dict[tuple[int, Kind], list[int]] = {}
    for placed, where in enumerate(problem.placed[1]):
        stage = problem.origin(placed)
        if where != rank:
            continue
        for kind in (F, B, I, W):
            kinds = (I, W) if kind == B and problem.stages[stage].split else (kind,)
            known = [unit_of[stage, k] for k in kinds if (stage, k) in unit_of]
            if len(known) == len(kinds):
                own = [(u, *(o for o in behind.get(u, ()) if rank in units[o].ranks)) for u in known]
                found[placed, kind] = [u * m for part in own for u in part]
    return found


class Merge(NamedTuple):
    rows: Longs
    first: Longs
    at: Longs
    done: Bools
    order: Longs


@kernel
def may_go(t: Units, s: Merge, entry: int) -> bool:
    """Whether an entry stands at the front of all its ranks, and what it needs is done."""
    m = t.microbatches
    u = entry // m
    for at in range(t.on_at[u], t.on_at[u + 1]):
        place = s.first[t.on[at]] + s.at[t.on[at]]
        if place >= s.first[t.on[at] + 1] or s.rows[place] != entry:
            return False
    for at in range(t.need_at[u], t.need_at[u + 1]):
        if not s.done[t.need[at] * m + entry % m]:
            return False
    return True


@kernel
def merge(t: Units, s: Merge) -> int:
    """Write an order in which nothing stands before what it needs. Returns: how many entries it has, fewer
    than there are if the rows block each other."""
    count, moved = 0, True
    while moved:
        moved = False
        for rank in range(len(s.at)):
            while s.first[rank] + s.at[rank] < s.first[rank + 1]:
                entry = s.rows[s.first[rank] + s.at[rank]]
                if not may_go(t, s, entry):
                    break
                s.done[entry] = True
                s.order[count] = entry
                count += 1
                u = entry // t.microbatches
                for at in range(t.on_at[u], t.on_at[u + 1]):
                    s.at[t.on[at]] += 1
                moved = True
    return count
