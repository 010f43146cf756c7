"""Eviction to a peer: a rank lends memory of its partner for the residuals of one micro-batch.

    0EVICT3   stage 0 hands the residuals of micro-batch 3 to the partner of its rank
    0FETCH3   takes them back, before its backward of micro-batch 3

The one who receives has them from the start of the action, the one who gives until its end. The partner of
rank x of p is rank p - 1 - x, as in BPipe: 1F1B holds most on the first rank and least on the last.
"""

from __future__ import annotations

from .action import EVICT, FETCH

__all__ = ["EVICT", "FETCH", "partner"]


def partner(rank: int, ranks: int) -> int:
    """The rank that keeps what `rank` evicts; the middle one of an odd number has none but itself.

    >>> [partner(rank, 4) for rank in range(4)]
    [3, 2, 1, 0]
    """
    return ranks - 1 - rank
