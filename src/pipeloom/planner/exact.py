"""exact: the best contiguous cut, by dynamic programming; the oracle that other planners are tested against.

Over all cuts of the op order into S intervals, stage s on rank s, none over its cap, the slowest stage is as
fast as can be: best[s][j] = min over i of max(best[s-1][i], F_s(i, j)). Time grows with
ops^2 x stages; with many ops a search over few cut positions first gives a bound, beyond which no interval
is looked at.
"""

from __future__ import annotations

from .search import Search


def exact(search: Search) -> tuple[int, ...]:
    """Cut positions, 0 and the number of ops included; () if nothing fits."""
    return search.fastest()[1]
