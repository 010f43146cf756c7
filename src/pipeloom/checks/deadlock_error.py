"""Board: runs one process per rank until each ends or waits for something that never comes.

A process is a generator. It posts what it has done and yields the key it waits for. Every post and every
wait is handled once, so a run takes time linear in the number of actions, whatever the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..ir.errors import DeadlockError

Process: TypeAlias = Iterator[Hashable]


class Board:
    """What has been done so far, and who waits for what.

    >>> def maker(board):
    ...     board.post("egg")
    ...     yield from board.wait("hen")
    >>> def taker(board):
    ...     yield from board.wait("egg")
    ...     yield from board.wait("chick")
    >>> board = Board()
    >>> board.run([taker(board), maker(board)])
    {0: 'chick', 1: 'hen'}
    """

    def __init__(self) -> None:
        self._posted: set[Hashable] = set()
        self._waiting: dict[Hashable, list[int]] = {}
        self._ready: deque[int] = deque()

    def post(self, key: Hashable) -> None:
        """Say that `key` is done, and wake those who wait for it."""
        self._posted.add(key)
        if key in self._waiting:
            self._ready.extend(self._waiting.pop(key))

    def wait(self, key: Hashable) -> Iterator[Hashable]:
        """`yield from` this in a process: goes on once `key` is posted."""
        if key not in self._posted:
            yield key

    def run(self, processes: Sequence[Process]) -> dict[int, Hashable]:
        """Run all processes as far as they go: index of each one that is stuck -> the key it lacks."""
        self._ready.extend(range(len(processes)))
        while self._ready:
            index = self._ready.popleft()
            for key in processes[index]:
                self._waiting.setdefault(key, []).append(index)
                break  # the generator stays where it is until the key is posted
        stuck = {index: key for key, waiters in self._waiting.items() for index in waiters}
        return dict(sorted(stuck.items()))


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A rank that stands at one action and needs another, which is `holder`'s to do."""

    rank: int
    at: str
    needs: str
    holder: int


SHOWN = 16
"""Ranks that a message lists before it only counts them."""


def deadlock(
    stuck: Sequence[Stuck], *, ready: Callable[[Stuck], tuple[int, str]] | None = None
) -> DeadlockError:
    """The error that prints the circle of waiting ranks first, then all others that wait behind it.

    ready: for a stuck rank, the rank and the action that could run now and is on the way to what it needs;
        the needed action itself unless given.

    >>> print(deadlock([Stuck(rank=0, at="0B0", needs="1B0", holder=1),
    ...                 Stuck(rank=1, at="1F1", needs="0F1", holder=0)]))
    no rank can move: rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1
    hint: they wait in a circle, rank 0 -> 1 -> 0: on rank 1 move 1B0 in front of 1F1, or reorder the others
    """
    by_rank = {s.rank: s for s in stuck}
    circle = _circle(by_rank)
    others = [s for s in stuck if s.rank not in set(circle)]
    listed = [by_rank[rank] for rank in circle] + others
    text = "; ".join(f"rank {s.rank} at {s.at} needs {s.needs}" for s in listed[:SHOWN])
    if len(listed) > SHOWN:
        text += f"; and {len(listed) - SHOWN} more ranks"
    first = by_rank[circle[0]]
    holder, action = ready(first) if ready else (first.holder, first.needs)
    loop = " -> ".join(map(str, [*circle, circle[0]]))
    return DeadlockError(
        f"no rank can move: {text}",
        hint=f"they wait in a circle, rank {loop}: on rank {holder} move {action} in front of "
        f"{by_rank[holder].at}, or reorder the others",
    )


def _circle(by_rank: dict[int, Stuck]) -> list[int]:
    """Ranks that wait for each other, from the lowest. There is one, as every holder is stuck too."""
    seen: dict[int, int] = {}
    rank = next(iter(by_rank))
    while rank not in seen:
        seen[rank] = len(seen)
        rank = by_rank[rank].holder
    circle = [r for r, position in seen.items() if position >= seen[rank]]
    start = circle.index(min(circle))
    return circle[start:] + circle[:start]
