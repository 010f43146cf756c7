"""Rows of ranks as one order of everything: rank after rank as far as each one comes, again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...ir.kernels import kernel
from .arrays import Units

if TYPE_CHECKING:
    from .arrays import Bools, Ints


class Merge(NamedTuple):
    """rows: entries of all ranks, those of rank r from `first[r]` on.  at: how many of each are done.  done:
    per entry.  order: what is written."""

    rows: Ints
    first: Ints
    at: Ints
    done: Bools
    order: Ints


@kernel
def may_go(t: Units, s: Merge, entry: int) -> bool:
    """Whether an entry stands at the front of all its ranks, and what it needs is done."""
    m = t.microbatches
    u = entry // m
    for at in range(t.on_at[u], t.on_at[u + 1]):
        place = s.first[t.on[at]] + s.at[t.on[at]]
        if place >= s.first[t.on[at] + 1] or s.rows[place] != entry:
            return False
    for at in range(t.need_at[u], t.need_at[u + 1]):
        if not s.done[t.need[at] * m + entry % m]:
            return False
    return True


@kernel
def merge(t: Units, s: Merge) -> int:
    """Write an order in which nothing stands before what it needs. Returns: how many entries it has, fewer
    than there are if the rows block each other."""
    count, moved = 0, True
    while moved:
        moved = False
        for rank in range(len(s.at)):
            while s.first[rank] + s.at[rank] < s.first[rank + 1]:
                entry = s.rows[s.first[rank] + s.at[rank]]
                if not may_go(t, s, entry):
                    break
                s.done[entry] = True
                s.order[count] = entry
                count += 1
                u = entry // t.microbatches
                for at in range(t.on_at[u], t.on_at[u + 1]):
                    s.at[t.on[at]] += 1
                moved = True
    return count
