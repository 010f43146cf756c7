"""exact: the best contiguous cut, by dynamic programming; the oracle that other planners are tested against.

Over all cuts of the op order into S intervals, stage s on rank s, none over its cap, the slowest stage is as
fast as can be: best[s][j] = min over i of max(best[s-1][i], F_s(i, j)). Time grows with ops^2 x stages.

With every residual kept, intervals are evaluated many at once (search.py); with many ops a search over few
cut positions first gives a bound, beyond which no interval is looked at. With memory optimisation each
interval is a problem of its own: the bound then comes from `probe`, and intervals are asked for one by one
(bands.py).
"""

from __future__ import annotations

from ...ir.errors import PlanError
from ..search.bands import all_bands, best_cuts_within
from ..search.cut_search import Search
from ..search.problem import Cuts, Partition, Problem
from .probe import parametric_search

MOST = 4_000_000
"""Intervals beyond which asking for each of them one by one is refused."""


def exact(search: Search) -> Cuts:
    """Cut positions, 0 and the number of ops included; () if nothing fits.

    Raises: PlanError if memory optimisation is on and there are too many intervals to optimise.
    """
    if not search.optimises:
        return search.fastest()[1]
    problem = search.problem
    if (intervals := problem.last**2 // 2 * problem.stages) > MOST:
        raise PlanError(
            f"planner exact with memory optimisation would weigh {intervals:,} intervals",
            hint="use planner dawnpiper or probe, or fewer ops: planner exact keeps every residual quickly",
        )
    return problem.positions(best_partition(problem).cuts)


def best_partition(problem: Problem) -> Partition:
    """The best partition there is."""
    first = parametric_search(problem)
    better = best_cuts_within(problem, all_bands(problem), below=first.seconds)
    return better if better.cuts else first
