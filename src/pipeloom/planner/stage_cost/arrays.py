"""Array types of the cost model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]


class RaggedArray(NamedTuple):
    """Lists of numbers, one after another: row r is `items[first[r] : first[r + 1]]`.

    first: (rows + 1,).  items: (sum of the lengths,).
    """

    first: Indices
    items: Indices

    def __getitem__(self, row: int) -> Indices:  # type: ignore[override]
        return self.items[self.first[row] : self.first[row + 1]]


def rows(lists: Iterable[Iterable[int]]) -> RaggedArray:
    """
    >>> rows([[3, 4], [], [5]])[2].tolist()
    [5]
    """
    each = [list(one) for one in lists]
    first = np.cumsum([0, *map(len, each)])
    return RaggedArray(first.astype(np.int64), np.array([i for one in each for i in one], dtype=np.int64))
