"""Places in a file, which gets longer only where no free piece is large enough."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable


class Places:
    """What of a file is taken and what is free. For one thread at a time.

        | taken | free     | taken | free |end        two free pieces never touch

    reserve: makes the file longer; called with where it ends and by how much, before anything is changed.
    """

    def __init__(self, reserve: Callable[[int, int], None]) -> None:
        self.end = 0
        self._reserve = reserve
        self._free: list[tuple[int, int]] = []  # size and begin, sorted
        self._size: dict[int, int] = {}  # of the free piece that begins there
        self._begin: dict[int, int] = {}  # of the free piece that ends there

    def take(self, size: int) -> int:
        """Where so many bytes may lie: in the smallest free piece that holds them, else at the end.

        Raises: what `reserve` does; nothing is taken then.
        """
        if size == 0:
            return self.end
        at = bisect_left(self._free, (size, 0))
        begin = self._free[at][1] if at < len(self._free) else self._lengthen(size)
        left = self._drop(begin) - size
        if left:
            self._add(begin + size, left)
        return begin

    def give_back(self, begin: int, size: int) -> None:
        """Free a place that was taken with this size."""
        if size == 0:
            return
        if begin + size in self._size:
            size += self._drop(begin + size)
        if begin in self._begin:
            begin = self._begin[begin]
            size += self._drop(begin)
        self._add(begin, size)

    def _lengthen(self, size: int) -> int:
        """Where the last piece begins, once the file is so long that the piece has this size."""
        begin = self._begin.get(self.end, self.end)
        lacking = begin + size - self.end
        self._reserve(self.end, lacking)
        if begin < self.end:
            self._drop(begin)
        self.end += lacking
        self._add(begin, size)
        return begin

    def _add(self, begin: int, size: int) -> None:
        insort(self._free, (size, begin))
        self._size[begin] = size
        self._begin[begin + size] = begin

    def _drop(self, begin: int) -> int:
        """No longer free. Returns the size of the piece."""
        size = self._size.pop(begin)
        del self._begin[begin + size]
        del self._free[bisect_left(self._free, (size, begin))]
        return size
