"""Walk: all ranks go through their columns until each ends or waits for an entry that is never reached."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ir.columns import REDUCE_, Columns, Ints, Longs
from ..ir.kernels import kernel
from .deadlock_error import Stuck, deadlock

_FREE, _DONE = -1, -2


def prove_progress(
    columns: Columns,
    first_need: Ints,
    needs: Ints,
    *,
    ready: Callable[[int, Callable[[int], bool]], int] | None = None,
) -> None:
    """Walk all ranks, each entry only after the entries that it needs.

    first_need: entry e needs `needs[first_need[e] : first_need[e + 1]]`, on whatever rank. A need of REDUCE
        is the entry in front of another REDUCE: they meet where both ranks have come to them.
    ready: for the message, from an entry that a rank lacks and what tells whether an entry was reached, the
        entry on the way to it that could run now; the lacking one itself unless given.
    Raises: DeadlockError with the circle of those that wait for each other.
    """
    ranks = columns.ranks
    at, lacking = columns.offsets[:-1].copy(), np.full(ranks, -1)
    state = np.full(len(columns), _FREE, np.int32)
    work = (np.full(ranks, _FREE), np.full(ranks, -1))
    _walk(columns.offsets, first_need, needs, state, work, (at, lacking))
    stuck = np.flatnonzero(lacking >= 0).tolist()
    if not stuck:
        return
    reason = [_stuck(columns, rank, int(at[rank]), int(lacking[rank])) for rank in stuck]
    if ready is None:
        raise deadlock(reason)
    search = ready

    def movable(one: Stuck) -> tuple[int, str]:
        entry = search(int(lacking[one.rank]), lambda entry: bool(entry < at[columns.rank_of(entry)]))
        return columns.rank_of(entry), str(columns.at(entry))

    raise deadlock(reason, ready=movable)


def _stuck(columns: Columns, rank: int, at: int, need: int) -> Stuck:
    shown = need + 1 if columns.kind[at] == REDUCE_ else need
    holder = columns.rank_of(need)
    return Stuck(rank=rank, at=str(columns.at(at)), needs=str(columns.at(shown)), holder=holder)


@kernel
def _walk(
    offsets: Longs,
    first_need: Ints,
    needs: Ints,
    state: Ints,
    work: tuple[Longs, Longs],
    found: tuple[Longs, Longs],
) -> None:
    """Find where each rank stands at last, and the entry that it lacks there, or -1 at its end.

    state: of each entry: free, done, or the first rank in the list of those that wait for it. So each entry
        is handled once.
    """
    ranks = len(offsets) - 1
    behind, next_need = work
    at, lacking = found
    stack = np.arange(ranks)[::-1].copy()  # woken last goes first, as in the simulator, to stay in the cache
    ready = ranks
    while ready:
        ready -= 1
        rank = stack[ready]
        lacking[rank] = -1
        entry, end = at[rank], offsets[rank + 1]
        need = next_need[rank]
        while entry < end:
            if need < 0:
                need = first_need[entry]
            while need < first_need[entry + 1] and state[needs[need]] == _DONE:
                need += 1
            if need < first_need[entry + 1]:
                lacking[rank] = needs[need]
                behind[rank] = state[needs[need]]
                state[needs[need]] = rank
                break
            waiter = state[entry]
            state[entry] = _DONE
            while waiter >= 0:
                stack[ready] = waiter
                ready += 1
                waiter = behind[waiter]
            need = -1
            entry += 1
        at[rank] = entry
        next_need[rank] = need
