"""Items: what took time in a step, and looking them up by when they ended."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Key: TypeAlias = tuple[str, int]
"""(an instruction's text, how often it came before): a step may run a program several times."""


@dataclass(slots=True, eq=False)  # looked up very often, and each is made once; not frozen, as that is slow
class Item:
    """Something that took time: an action, a message on its way, a sum over ranks, a copy.

    place: which of its rank's compute actions it is; of a message, the place of the action that waits; of a
        copy, how many compute actions stand in front of it.
    waiting: of something that holds a shared link, the message or copy that waits for it; then it ends when
        it lets go of the link.
    """

    kind: Literal["compute", "transfer", "reduce", "copy"]
    rank: int
    action: str
    turn: int
    start_s: float
    end_s: float
    place: int
    to_rank: int = -1
    waiting: str = ""


class Ends:
    """Items to be found by their end."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = sorted(items, key=lambda i: i.end_s)
        self._ends = [i.end_s for i in self._items]

    def until(self, at_s: float, *, most: int | None = None) -> Item | None:
        """The last one that took time and ended by `at_s`; `most`: of the first so many."""
        place = bisect_right(self._ends, at_s, hi=most)
        while place:
            place -= 1
            if self._items[place].end_s > self._items[place].start_s:
                return self._items[place]
        return None
