"""Sums over an interval of ops in which every thing counts once, however many ops use it.

The bytes of the parameters that ops i..j-1 read, of the values that they save, of the values that cross
into them: each is a sum over distinct things. It is written as terms that hold for some starts: a term
adds its weight to every interval [i, j) with `after` < i <= `until` and j > `at`. For a parameter used at
positions 3 and 8 that is one term (-1, 3, 3) and one term (3, 8, 8): an interval that starts at or before 3
finds it at 3, one that starts at 4 to 8 finds it at 8. A row, all intervals with one start, is then one
cumulative sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Term = tuple[int, int, int, int, float]
"""(after, until, at, column, weight)"""


def first_use_terms(
    positions: Sequence[int], column: int, weight: float, *, after: int = -1
) -> Iterable[Term]:
    """Terms of a thing that counts once where any of `positions` (ascending) is in an interval.

    after: it counts only in intervals that start later than this.
    """
    previous = -1
    for position in positions:
        if position > after:
            yield max(previous, after), position, position, column, weight
        previous = position


class IntervalSums:
    """Several such sums, one per column.

    >>> sums = IntervalSums(3, 1, first_use_terms([0, 2], column=0, weight=5.0))
    >>> sums.row(0, 3).tolist(), sums.row(1, 3).tolist()
    ([[5.0, 5.0, 5.0]], [[0.0, 5.0]])
    """

    def __init__(self, positions: int, columns: int, terms: Iterable[Term]) -> None:
        self.columns = columns
        table = np.array(sorted(terms, key=lambda t: t[2]), dtype=np.float64).reshape(-1, 5)
        self.after = table[:, 0].astype(np.int64)
        self.until = table[:, 1].astype(np.int64)
        self.at = table[:, 2].astype(np.int64)
        self.column = table[:, 3].astype(np.int64)
        self.weight = table[:, 4]
        self.begin = np.searchsorted(self.at, np.arange(positions + 1))

    def row(self, start: int, stop: int) -> Array:
        """Sums of [start, start+1), [start, start+2), ... [start, stop): columns x (stop - start)."""
        window = slice(self.begin[start], self.begin[stop])
        valid = (self.after[window] < start) & (start <= self.until[window])
        width = stop - start
        cell = self.column[window][valid] * width + self.at[window][valid] - start
        sums = np.bincount(cell, self.weight[window][valid], minlength=self.columns * width)
        return np.cumsum(sums.reshape(self.columns, width), axis=1, dtype=np.float64)
