"""Allocates byte ranges of a file (best fit), which grows only where no free range is large enough."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable


class FileAllocator:
    """Which byte ranges of a file are used and which are free. For one thread at a time.

        | used | free     | used | free |end        two free ranges never touch: they are merged

    end: length of the file in bytes.
    reserve: makes the file longer; called with where it ends and by how much, before anything is changed.

    >>> allocator = FileAllocator(lambda end, size: None)
    >>> a, b = allocator.allocate(100), allocator.allocate(50)
    >>> allocator.free(a, 100)
    >>> a, b, allocator.allocate(40), allocator.end
    (0, 100, 0, 150)
    """

    def __init__(self, reserve: Callable[[int, int], None]) -> None:
        self.end = 0
        self._reserve = reserve
        self._free: list[tuple[int, int]] = []  # (size, begin), sorted
        self._size: dict[int, int] = {}  # begin -> size of a free range
        self._begin: dict[int, int] = {}  # end -> begin of a free range

    def allocate(self, size: int) -> int:
        """The offset of `size` bytes: in the smallest free range that holds them, else at the end.

        Raises: what `reserve` does; nothing is allocated then.
        """
        if size == 0:
            return self.end
        at = bisect_left(self._free, (size, 0))
        begin = self._free[at][1] if at < len(self._free) else self._lengthen(size)
        left = self._drop(begin) - size
        if left:
            self._add(begin + size, left)
        return begin

    def free(self, begin: int, size: int) -> None:
        """Free a range that was allocated with this size."""
        if size == 0:
            return
        if begin + size in self._size:
            size += self._drop(begin + size)
        if begin in self._begin:
            begin = self._begin[begin]
            size += self._drop(begin)
        self._add(begin, size)

    def _lengthen(self, size: int) -> int:
        """Grow the file until its last free range has this size; returns where that begins."""
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
        """A range is no longer free; returns its size."""
        size = self._size.pop(begin)
        del self._begin[begin + size]
        del self._free[bisect_left(self._free, (size, begin))]
        return size
