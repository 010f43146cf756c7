"""Rows with copies: where RELOADs and AWAITs stand so that a rank never holds more than its limit.

Everything here is counted along a row, as if a copy to the host ended only when it is awaited: so the limit
holds at any speed of the links.

    row       F0 OFFLOAD0 F1 OFFLOAD1 AWAIT0 F2 OFFLOAD2 RELOAD0 I0 W0
    held      1           2                  2           3       3  2      residuals of micro-batches

A RELOAD needs the room that no forward in front of its backward will need: this part of the row is fixed, and
a forward that waited for that backward would wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...ir.columns import AWAIT_, OFFLOAD_, RELOAD_, Bools, Columns, Floats, Longs
from ...ir.kernels import kernel


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes per stage. residual: from F until B or I.  carried: from I until W.  copied: of `residual`, what
    OFFLOAD takes.  dropped: of it, what goes with F and is made again for B or I."""

    residual: Floats
    carried: Floats
    copied: Floats
    dropped: Floats


class Lives(NamedTuple):
    """(stages, micro-batches): entries of F, of B or I, and of W, or of B, which end what a forward keeps."""

    forward: Longs
    back: Longs
    last: Longs


class RankItems(NamedTuple):
    """What is copied on a rank, in the order of the backwards that need it, by entry of its row, which begins
    at entry `first`; size in bytes."""

    first: int
    forward: Longs
    back: Longs
    size: Floats


def held_bytes(columns: Columns, lives: Lives, sizes: Sizes, copied: Bools) -> Floats:
    """Bytes that a rank holds while it runs each entry, if what is `copied` is on the host from the end of
    its forward until its backward begins."""
    change = np.zeros(len(columns) + 1)
    there = lives.back >= 0
    of_stage = np.broadcast_to(np.arange(len(sizes.residual))[:, None], there.shape)

    def add(at: Longs, amount: Floats, chosen: Bools) -> None:
        np.add.at(change, at[chosen], amount[of_stage[chosen]])

    add(lives.forward, sizes.residual, there)
    add(lives.forward + 1, -sizes.dropped, there)
    add(lives.back, sizes.dropped, there)
    add(lives.forward + 1, -sizes.copied, there & copied)
    add(lives.back, sizes.copied, there & copied)
    add(lives.back + 1, -sizes.residual, there)
    split = there & (lives.last > lives.back)
    add(lives.back + 1, sizes.carried, split)
    add(lives.last + 1, -sizes.carried, split)
    held: Floats = np.cumsum(change[:-1])
    return held


@kernel
def find_reloads(items: RankItems, wanted: Longs, limit: float, held: Floats, found: Longs) -> None:
    """The entry in front of which each RELOAD stands: the wanted one, or the first one behind it from which
    on there is room until the backward. What is reloaded is added to `held`."""
    earliest = 0
    for j in range(len(items.back)):
        at = items.back[j]
        lowest = max(wanted[j], items.forward[j] + 1, earliest)
        while at > lowest and held[at - 1] + items.size[j] <= limit:
            at -= 1
            held[at] += items.size[j]
        found[j] = at
        earliest = at


class RowInserts(NamedTuple):
    """at: the entry in front of which (behind which for OFFLOADs).  item: what it copies."""

    at: Longs
    code: Longs
    item: Longs


class Work(NamedTuple):
    """leaving: the items that leave, in order.  state: per item 1 while it leaves, then 2; 0 at first."""

    leaving: Longs
    state: Longs


@kernel
def find_inserts(
    items: RankItems,
    row: tuple[Longs, Floats, Floats],
    reload: Longs,
    limit: float,
    work: Work,
    inserts: RowInserts,
) -> int:
    """Walk a row: OFFLOAD behind forwards, RELOAD where it was found, and AWAIT in front of what would pass
    the limit. Returns how many there are.

    row: per entry the item whose forward it is, or -1; the bytes that come when it begins; the bytes that are
    held while it runs, with what is reloaded.  reload: the entry of each RELOAD.
    """
    of_forward, comes, held = row
    count, coming, first, last, away = 0, 0, 0, 0, 0.0
    for entry in range(len(of_forward)):
        low = coming
        while coming < len(reload) and reload[coming] == entry:
            if work.state[coming] == 1:  # it goes on with what has not left
                work.state[coming] = 2
                away -= items.size[coming]
            coming += 1
        for turn in range(2):
            level = held[entry] if turn else held[entry] - comes[entry]
            waits = turn or coming > low
            while waits and first < last and away + level > limit:
                oldest = work.leaving[first]
                first += 1
                if work.state[oldest] == 1:
                    work.state[oldest] = 2
                    away -= items.size[oldest]
                    inserts.at[count], inserts.code[count], inserts.item[count] = entry, AWAIT_, oldest
                    count += 1
            if not turn:
                for item in range(low, coming):
                    inserts.at[count], inserts.code[count], inserts.item[count] = entry, RELOAD_, item
                    count += 1
        if of_forward[entry] >= 0:
            item = of_forward[entry]
            work.leaving[last] = item
            last += 1
            work.state[item] = 1
            away += items.size[item]
            inserts.at[count], inserts.code[count], inserts.item[count] = entry + 1, OFFLOAD_, item
            count += 1
    return count
