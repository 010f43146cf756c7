"""balanced, equal, exact: planners that are one loop, or one call of a search.

exact is the oracle that other planners are tested against. Over all cuts of the op order into S intervals,
stage s on rank s, none over its cap, the slowest stage is as fast as can be:

    best[s][j] = min over i of max(best[s-1][i], F_s(i, j))           time: ops^2 x stages

With every residual kept, intervals are evaluated many at once (cut_search.py); with many ops a search over
few cut positions first gives a bound, beyond which no interval is looked at. With memory optimisation each
interval is a problem of its own: the bound then comes from `probe`, and intervals are asked for one by one
(problem.py).

equal is Megatron-LM's division, as many of the repeated layers in each stage as in any other. The embedding
goes with the first layer, and what follows a layer with that layer, the head and the loss with the last one.
Where the number of stages does not divide that of the layers, shares differ by one. Neither times nor memory
are looked at. Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

import numpy as np

from ...ir.errors import PlanError
from ..search.cut_search import Search
from ..search.layer_groups import layers
from ..search.problem import Cuts, all_bands, best_cuts_within
from .probe import parametric_search


def balanced(search: Search) -> Cuts:
    """Cut after the op at which the running time is nearest to 1/S, 2/S, ... of the whole."""
    prefix, points = search.model.tables.prefix_s[0], search.model.cut_points
    stages = len(search.caps)
    chosen = [0]
    for stage in range(1, stages):
        target = prefix[-1] * stage / stages
        first, last = chosen[-1] + 1, len(points) - 1 - (stages - stage)
        chosen.append(first + int(np.argmin(np.abs(prefix[points[first : last + 1]] - target))))
    return (*(int(points[index]) for index in chosen), int(points[-1]))


def equal(search: Search) -> Cuts:
    """Cut positions. Raises: PlanError if there are fewer layers than stages."""
    points = search.model.cut_points.tolist()
    pieces = layers(search.model.readers.ops)
    repeated = [piece for piece in pieces if piece.layer] or pieces
    allowed = set(points[1:-1])
    inner = [piece.start for piece in repeated[1:] if piece.start in allowed]
    count, stages = len(inner) + 1, len(search.caps)
    if count < stages:
        raise PlanError(
            f"planner equal found {count} layers for {stages} stages",
            hint="use fewer stages, or planner balanced, which cuts within layers",
        )
    return (0, *(inner[stage * count // stages - 1] for stage in range(1, stages)), points[-1])


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
    first = parametric_search(problem)
    better = best_cuts_within(problem, all_bands(problem), below=first.seconds)
    return problem.positions((better if better.cuts else first).cuts)
