"""Every schedule of the library that fits the stages, their ranks and the limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....ir.action import Action, B, F, I, W
from ....ir.errors import ScheduleError
from ...placements import both_ways, loop, wave
from ...registry import FAMILIES, Times, build, entry
from ..candidate import Candidate, fits, timed
from ..engine import Found, Round
from ..problem import SearchProblem

LARGE = 3000
"""Actions of a step from which a schedule is built once, and only where it is meant to run."""


def run(task: Round) -> Iterator[Found]:
    """Build them one by one, within the limits that were asked for."""
    for name in fitting(task.problem) if task.last else ():
        yield Found(candidate=library_order(task.problem, name), evaluations=1)


def fitting(problem: SearchProblem) -> list[str]:
    """Names of schedules whose placement may be that of the problem; of large problems, whose placement it
    is."""
    chunks, ranks, placement = problem.shape.chunks, problem.ranks, problem.placed[1]
    meant = {
        "line": placement if chunks == 1 else (),
        "loop": loop(ranks, chunks),
        "wave": wave(ranks, chunks),
        "both ways": both_ways(ranks),
    }
    large = problem.entries > LARGE
    names = []
    for name in FAMILIES:
        known = entry(name)
        several = known.place in ("loop", "wave", "both ways")
        fits_place = not several or (chunks > 1 and not problem.placed[0].shards)
        if large and placement != meant.get(known.place, placement):
            continue
        if known.lacks == "" and name != "forward_only" and fits_place:
            names.append(name)
    return names


def library_order(problem: SearchProblem, name: str) -> Candidate | None:
    """A schedule of the library as an order; None if it does not run so, or breaks a limit.

    The shorter of what it is without knowing the limits, if it keeps to them, and of what it makes of them.
    """
    free = _built(problem, name, limited=False)
    if not problem.caps or entry(name).recipe is None or (free is not None and problem.entries > LARGE):
        return free
    limited = _built(problem, name, limited=True)
    known = [one for one in (free, limited) if one is not None]
    return min(known, key=lambda one: one.cost_s, default=None)


def _built(problem: SearchProblem, name: str, *, limited: bool) -> Candidate | None:
    graph, placement = problem.placed
    shape = problem.shape
    times = Times(
        costs=shape.costs,
        transfer_s=shape.transfer_s,
        limit_bytes=shape.limit_bytes if limited else None,
        shortest=problem.shortest,
    )
    try:
        schedule = build(name, graph, placement, problem.microbatches, times=times)
    except ScheduleError:
        return None
    order = order_of_rows(problem, schedule.rows)
    if order is None:
        return None
    found = timed(problem, order, f"library: {name}")
    return found if fits(found, problem.arrays.cap) else None


def order_of_rows(problem: SearchProblem, rows: Sequence[Sequence[Action]]) -> np.ndarray | None:
    """Rows as an order of units; None where they have something else, or split a backward that is whole.

    A whole backward of a stage that may split it is I and right behind it W: never later than the two as one.
    """
    m, units = problem.microbatches, problem.units
    unit_of = {(u.stage, u.kind, r): i for i, u in enumerate(units) for r in u.ranks}
    behind: dict[int, list[int]] = {}  # operations go right behind their anchors, on their rank
    for i, u in enumerate(units):
        if u.kind not in (F, B, I, W):
            (anchor,) = problem.needs[i]
            behind.setdefault(anchor, []).append(i)
    heads: list[list[int]] = []
    for rank, row in enumerate(rows):
        entries: list[int] = []
        for action in row:
            stage = problem.origin(action.stage)
            split = action.kind == B and problem.stages[stage].split
            for kind in (I, W) if split else (action.kind,):
                unit = unit_of.get((stage, kind, rank))
                if unit is None:
                    return None
                entries.append(unit * m + action.microbatch)
                entries += [o * m + action.microbatch for o in behind.get(unit, ()) if rank in units[o].ranks]
        heads.append(entries)
    at, done = [0] * len(heads), np.zeros(len(units) * m, np.bool_)
    order: list[int] = []
    moved = True
    while moved:
        moved = False
        for rank, entries in enumerate(heads):
            while at[rank] < len(entries):
                entry_at = entries[at[rank]]
                unit, b = divmod(entry_at, m)
                ranks = units[unit].ranks
                here = all(at[r] < len(heads[r]) and heads[r][at[r]] == entry_at for r in ranks)
                if not here or not all(done[p * m + b] for p in problem.needs[unit]):
                    break
                done[entry_at] = True
                order.append(entry_at)
                for r in ranks:
                    at[r] += 1
                moved = True
    return np.array(order, np.int64) if len(order) == len(done) else None
