"""Free room of a file: what is taken never overlaps, and what is given back is used again."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from pipeloom.runtime.file_tier import FileAllocator

SIZES = st.integers(0, 12)
MOVES = st.lists(st.tuples(st.booleans(), SIZES), max_size=60)
"""Take a place of that size, or give back one of those taken (the number picks it)."""


class File:
    """A file that may be `limit` long, and what of it is taken, as a list of pieces."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.length, self.limit = 0, limit
        self.taken: list[tuple[int, int]] = []
        self.allocator = FileAllocator(self.lengthen)

    def lengthen(self, end: int, size: int) -> None:
        assert end == self.length and size > 0
        if end + size > self.limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.length += size

    def take(self, size: int) -> None:
        gaps, before = list(self.gaps()), self.length
        begin = self.allocator.allocate(size)
        if size and self.length > before:
            assert all(length < size for _, length in gaps), "there was room"
            last = next((length for at, length in gaps if at + length == before), 0)
            assert self.length == before + size - last
        elif size:
            assert (begin, min(length for _, length in gaps if length >= size)) in gaps
        self.taken.append((begin, size))

    def give_back(self, which: int) -> None:
        if self.taken:
            self.allocator.free(*self.taken.pop(which % len(self.taken)))

    def gaps(self) -> Iterator[tuple[int, int]]:
        at = 0
        for begin, size in [*sorted(piece for piece in self.taken if piece[1]), (self.length, 0)]:
            assert at <= begin <= begin + size <= self.length, "they overlap, or lie outside"
            if begin > at:
                yield at, begin - at
            at = begin + size

    def assert_right(self) -> None:
        assert self.allocator.end == self.length
        assert self.allocator._free == list(self.gaps())


@given(MOVES)
def test_places_never_overlap_and_all_comes_back(moves: list[tuple[bool, int]]) -> None:
    file = File()
    for takes, number in moves:
        file.take(number) if takes else file.give_back(number)
        file.assert_right()
    while file.taken:
        file.give_back(-1)
    file.assert_right()
    assert list(file.gaps()) == ([(0, file.length)] if file.length else [])


@given(MOVES, st.integers(1, 12))
def test_of_equal_sizes_the_file_holds_no_more_than_there_were_at_once(
    moves: list[tuple[bool, int]], size: int
) -> None:
    file, most = File(), 0
    for takes, number in moves:
        file.take(size) if takes else file.give_back(number)
        most = max(most, len(file.taken))
    assert file.length == most * size


@given(MOVES, st.integers(0, 40))
def test_where_the_disk_is_full_nothing_changes(moves: list[tuple[bool, int]], limit: int) -> None:
    file = File(limit)
    for takes, number in moves:
        if not takes:
            file.give_back(number)
            continue
        before = (file.length, list(file.taken))
        try:
            file.take(number)
        except OSError:
            assert before == (file.length, file.taken)
            assert all(length < number for _, length in file.gaps())
        file.assert_right()


@pytest.mark.parametrize("sizes", [range(8, 100, 3), range(100, 8, -3), [40, 80] * 9])
def test_steps_of_other_sizes_share_the_room(sizes: list[int]) -> None:
    """Four micro-batches at once, as large as the step's: the file is as long as those of the largest."""
    file = File()
    for size in sizes:
        for _ in range(4):
            file.take(size)
        while file.taken:
            file.give_back(0)
    assert file.length == 4 * max(sizes)
