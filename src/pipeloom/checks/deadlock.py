"""Deadlock: the proof that all ranks reach their end, and the error that shows the circle where they do not.

The proof lets every rank walk its row. An entry is passed once all entries that it needs are passed, on
whatever rank; a rank that lacks one waits in a list of that entry, and goes on when it is passed:

    rank 0:  0F0  0F1  0B0 ...           at 0B0: lacks 1B0, which rank 1 has not passed
                        |
    rank 1:  1F0  1B0 ...                passes 1B0, and wakes rank 0

So each entry and each need is looked at once, whatever the order: time is linear in their number. Where ranks
stand at last does not depend on who goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..ir.columns import Ints, Longs
from ..ir.errors import DeadlockError
from ..ir.kernels import kernel

_FREE, _PASSED = -1, -2

SHOWN = 16


class Needs(NamedTuple):
    """Entry e needs `entries[first[e] : first[e + 1]]`, on any rank; rank r has entries `offsets[r]` up to
    `offsets[r + 1]`."""

    offsets: Longs
    first: Ints
    entries: Ints


class _Walk(NamedTuple):
    """Where a walk stands.

    at: per rank its entry.  lacking: per rank the entry that it lacks there, -1 for none.
    next_need: per rank the first need of its entry that may still be lacking, -1 at a new entry.
    next_waiter: per rank the one that waits behind it for the same entry, -1 for none.
    state: per entry `_FREE`, `_PASSED`, or the first rank in the list of those that wait for it.
    stack: ranks that can go on.
    """

    at: Longs
    lacking: Longs
    next_need: Longs
    next_waiter: Longs
    state: Ints
    stack: Longs


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A rank that stands at one action and needs another, which is `holder`'s to do."""

    rank: int
    at: str
    needs: str
    holder: int


def prove_progress(
    needs: Needs,
    name: Callable[[int], str],
    *,
    name_need: Callable[[int, int], str] | None = None,
    ready: Callable[[int, Callable[[int], bool]], int] | None = None,
) -> None:
    """Walk all ranks, each entry only after the entries that it needs.

    name_need: of the entry that has a need, and the needed one.
    ready: from a lacking entry and what tells whether an entry was reached, the entry on the way to it that
        could run now, for the hint.
    Raises: DeadlockError with the circle of those that wait for each other.
    """
    offsets, ranks = needs.offsets, len(needs.offsets) - 1
    walk = _Walk(
        at=offsets[:-1].copy(),
        lacking=np.full(ranks, -1),
        next_need=np.full(ranks, -1),
        next_waiter=np.full(ranks, -1),
        state=np.full(len(needs.first) - 1, _FREE, np.int32),
        # What is woken last goes first, as in the simulator, to stay in the cache.
        stack=np.arange(ranks)[::-1].copy(),
    )
    _walk(needs, walk)
    at, lacking = walk.at.tolist(), walk.lacking.tolist()

    def rank_of(entry: int) -> int:
        return int(np.searchsorted(offsets, entry, side="right")) - 1

    stuck = [
        Stuck(
            rank=rank,
            at=name(at[rank]),
            needs=name_need(at[rank], need) if name_need else name(need),
            holder=rank_of(need),
        )
        for rank, need in enumerate(lacking)
        if need >= 0
    ]
    if not stuck:
        return
    if ready is None:
        raise deadlock(stuck)
    search = ready

    def movable(one: Stuck) -> tuple[int, str]:
        entry = search(lacking[one.rank], lambda entry: bool(entry < at[rank_of(entry)]))
        return rank_of(entry), name(entry)

    raise deadlock(stuck, ready=movable)


@kernel
def _walk(needs: Needs, walk: _Walk) -> None:
    ranks = len(needs.offsets) - 1
    stack, ready = walk.stack, ranks
    while ready:
        ready -= 1
        rank = stack[ready]
        walk.lacking[rank] = -1
        entry, end = walk.at[rank], needs.offsets[rank + 1]
        need = walk.next_need[rank]  # those in front of it are passed: they are not looked at again
        while entry < end:
            if need < 0:
                need = needs.first[entry]
            while need < needs.first[entry + 1] and walk.state[needs.entries[need]] == _PASSED:
                need += 1
            if need < needs.first[entry + 1]:
                # Put the rank in front of those that wait for this entry. It waits for one entry at a time,
                # so that it is in one list; `_FREE` ends it.
                lacking = needs.entries[need]
                walk.lacking[rank] = lacking
                walk.next_waiter[rank] = walk.state[lacking]
                walk.state[lacking] = rank
                break
            waiter = walk.state[entry]
            walk.state[entry] = _PASSED
            while waiter >= 0:
                stack[ready] = waiter
                ready += 1
                waiter = walk.next_waiter[waiter]
            need = -1
            entry += 1
        walk.at[rank] = entry
        walk.next_need[rank] = need


def deadlock(
    stuck: Sequence[Stuck], *, ready: Callable[[Stuck], tuple[int, str]] | None = None
) -> DeadlockError:
    """The error that prints the circle of waiting ranks first, then all others that wait behind it.

    ready: for a stuck rank, the rank and the action that could run now and is on the way to what it needs.

    >>> print(deadlock([Stuck(rank=0, at="0B0", needs="1B0", holder=1),
    ...                 Stuck(rank=1, at="1F1", needs="0F1", holder=0)]))
    no rank can move: rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1
    hint: they wait in a circle, rank 0 -> 1 -> 0: on rank 1 move 1B0 in front of 1F1, or reorder the others
    """
    by_rank = {s.rank: s for s in stuck}
    # From any stuck rank to the one that it waits for, until one comes again: every holder is stuck too.
    way, rank = [], next(iter(by_rank))
    while rank not in way:
        way.append(rank)
        rank = by_rank[rank].holder
    circle = way[way.index(rank) :]
    lowest = circle.index(min(circle))
    circle = circle[lowest:] + circle[:lowest]
    others = [s for s in stuck if s.rank not in set(circle)]
    listed = [by_rank[rank] for rank in circle] + others
    text = "; ".join(f"rank {s.rank} at {s.at} needs {s.needs}" for s in listed[:SHOWN])
    if len(listed) > SHOWN:
        text += f"; and {len(listed) - SHOWN} more ranks"
    first = by_rank[circle[0]]
    holder, action = ready(first) if ready else (first.holder, first.needs)
    at = by_rank[holder].at
    advice = f"on rank {holder} move {action} in front of {at}, or reorder the others"
    if action == at:  # nothing holds it up but the action that it is to begin with
        advice = f"on rank {holder} let {at} begin alone, without the action that it is paired with"
    loop = " -> ".join(map(str, [*circle, circle[0]]))
    return DeadlockError(f"no rank can move: {text}", hint=f"they wait in a circle, rank {loop}: {advice}")
