"""The pass that puts copies into any rows: which micro-batches leave, and when they come back.

    1. When everything happens without copies, by the simulator.
    2. Which residuals leave: those of the stages of a rank that are kept longest, or, under a limit, single
       micro-batches, the longest kept first. What is needed again too soon stays.
    3. When each must begin to come back: from the last backward to the first, each in the latest slot of its
       uplink that is free.
    4. Where that is in the row, with room for it, and which copies are awaited.
    5. The same for some other margins and limits; the one whose step is shortest is kept, and of those as
       good as it the one that holds least.

What a rank holds is counted along its row, as if a copy to the host ended only when it is awaited: so a limit
holds at any speed of the links.

    row       F0 OFFLOAD0 F1 OFFLOAD1 AWAIT0 F2 OFFLOAD2 RELOAD0 I0 W0
    held      1           2                  2           3       3  2      residuals of micro-batches

A RELOAD needs the room that no forward in front of its backward will need: this part of the row is fixed, and
a forward that waited for that backward would wait for ever.

Source: the idea of placing copies in a schedule, of PipeOffload (arXiv 2503.01328, section 4.2), which takes
fixed slots of one length for the copies of two ranks in turn, for an even number of ranks. Here slots follow
from times stage by stage, and room is proved, so that nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..ir.action import COPYING, Action
from ..ir.action_index import ActionIndex
from ..ir.columns import (
    AWAIT_,
    B_,
    CODE,
    F_,
    OFFLOAD_,
    RELOAD_,
    W_,
    Bools,
    Columns,
    Floats,
    Longs,
    Rows,
    columns_of,
)
from ..ir.errors import ScheduleError
from ..ir.kernels import kernel
from ..ir.schedule import Pair
from .language.shape import Shape
from .language.uplinks import USUAL_K, Uplinks, shared_uplinks, with_copies
from .list_scheduler.choose import row_times


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
    """What is copied on a rank, in the order of the backwards that need it: entries of its row, and bytes."""

    forward: Longs
    back: Longs
    size: Floats


def held_bytes(columns: Columns, lives: Lives, sizes: Sizes, copied: Bools) -> Floats:
    """Bytes that a rank holds while it runs each entry, if what is `copied` is on the host from the end of
    its forward until its backward begins."""
    # A sum over all rows at once: what comes in a row also goes in it, so that it is 0 where the next begins.
    # What begins with an entry is added at it, what ends with it behind it.
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
    # In the order of backwards, and none in front of the one before it: a rank's copies use one lane.
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


SHORT = 1.5
"""What is needed again within so many times its two copies stays on the device."""

IN_TRANSIT = 3
"""Residuals that a rank may hold on top of what stays: of the running forward, on their way out, and back."""

MARGINS = (0.0, 0.5, 1.0, 2.0)
"""Copies that a RELOAD begins earlier than it must."""

AS_GOOD = 1.001
"""A step that is longer by no more than this is as good."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What to copy. stages: of how many stages of each rank.  held: the most that a rank may hold, in
    residuals of one micro-batch on its largest stage, for which single micro-batches of other stages leave as
    well. strict: refuse rows that need more than `held` even so.  room: the same limit in bytes per rank;
    rows that need more hold as little as they can."""

    stages: int = 0
    held: float | None = None
    strict: bool = False
    room: tuple[float, ...] | None = None


class _Base(NamedTuple):
    """Rows without copies, when what happens, and what is to be copied. largest: bytes of one micro-batch on
    the largest stage of each rank.  most: that each rank may hold, if `limited`."""

    shape: Shape
    columns: Columns
    uplinks: Uplinks
    lives: Lives
    sizes: Sizes
    copies: Copies
    largest: Floats
    most: Floats
    limited: bool
    start: Floats
    end: Floats


def place_copies(
    rows: Iterable[Iterable[Action]], shape: Shape, copies: Copies, *, pairs: Sequence[Pair] = ()
) -> Rows:
    """Rows with copies. rows: complete, in order, without copies.

    Raises: ScheduleError if there are pairs, or no backwards.
    """
    columns = columns_of(rows)
    if pairs or not columns.trains:
        raise ScheduleError(
            f"copies cannot be placed in rows with {'pairs' if pairs else 'forwards only'}",
            hint="leave out `offload` and `limit`" + ("; or the pairs, with pairs=0" if pairs else ""),
        )
    if not any(cost.offloaded_bytes for cost in shape.costs):
        shape = replace(shape, costs=with_copies(shape.costs, USUAL_K))
    if shape.uplinks is None:
        shape = replace(shape, uplinks=shared_uplinks(shape.costs, shape.ranks))
    index = ActionIndex(columns, stages=len(shape.placement), microbatches=shape.microbatches)
    last = index.of(B_)
    lives = Lives(
        index.of(F_).astype(np.int64),
        index.gradients().astype(np.int64),
        np.where(last >= 0, last, index.of(W_)).astype(np.int64),
    )
    costs = shape.costs
    sizes = Sizes(
        residual=np.array([cost.residual_bytes for cost in costs], np.float64),
        carried=np.array([cost.carried_bytes for cost in costs], np.float64),
        copied=np.array([cost.offloaded_bytes for cost in costs], np.float64),
        # Of a stage without copies a plan keeps all, unless its schedule fits the caps.
        dropped=np.array([cost.recomputed_bytes * (copies.room is not None) for cost in costs], np.float64),
    )
    largest = np.array([sizes.residual[list(own)].max() for own in shape.rank_stages])
    limited = copies.held is not None or copies.room is not None
    held = np.full(shape.ranks, np.inf) if copies.held is None else copies.held * largest
    most = held if copies.room is None else np.array(copies.room, np.float64)
    assert shape.uplinks is not None
    base = _Base(
        shape,
        columns,
        shape.uplinks,
        lives,
        sizes,
        copies,
        largest,
        most,
        limited,
        *row_times(columns, shape),
    )
    chosen = [_chosen(base)]
    if copies.strict or copies.room is not None:
        # What comes back at once costs time, but where nothing else keeps the limit that is what is asked.
        short = 0.0 if (_needs(base, chosen[0]) > base.most).any() else SHORT
        several = (_chosen(base, short, transit) for transit in range(IN_TRANSIT, -1, -1))
        different = list({one.tobytes(): one for one in several}.values())
        chosen = [one for one in different if (_needs(base, one) <= base.most).all()] or different
    tries = [one for copied in chosen for one in _placing(base, copied)]
    shortest = min(step_s for step_s, _, _ in tries)
    good = [one for one in tries if one[0] <= AS_GOOD * shortest]
    return Rows(min(good, key=lambda one: (one[1], one[0]))[2])


def _placing(base: _Base, copied: Bools) -> Iterator[tuple[float, float, Columns]]:
    """Several ways to place copies of what is chosen: the step in seconds, the sum of limits, the rows."""
    if not copied.any():
        yield float(base.end.max()), 0.0, base.columns
        return
    for limits in _limits(base, copied):
        for margin in MARGINS:
            made = _placed(base, copied, limits, margin)
            step_s = float(row_times(made, base.shape)[1].max())
            yield step_s, float(sum(limits)), made


def _chosen(base: _Base, short: float = SHORT, transit: int = IN_TRANSIT) -> Bools:
    """Which micro-batches of which stages leave: those of the stages that are to, then, under a limit, the
    longest kept of the others, as many as it takes to leave `transit` of it free, or all."""
    costs = base.shape.costs
    window_s = base.start[base.lives.back] - base.end[base.lives.forward]  # from the end of F to B or I
    there_and_back = np.array([cost.offload_s + cost.reload_s for cost in costs])
    leaves = (window_s > short * there_and_back[:, None]) & (base.sizes.copied > 0)[:, None]
    chosen = np.zeros_like(leaves)
    for own in base.shape.rank_stages:
        longest = sorted(own, key=lambda stage: -float(window_s[stage].mean()))
        chosen[longest[: base.copies.stages]] = True
    chosen &= leaves
    if not base.limited:
        return chosen
    # Places in the order in which they are chosen, counted on each rank by itself.
    placement = np.array(base.shape.placement)
    turn = np.full(leaves.shape, np.iinfo(np.int64).max)
    candidates = []
    for rank in range(base.shape.ranks):
        stages, numbers = np.nonzero(leaves & ~chosen & (placement == rank)[:, None])
        order = np.argsort(-window_s[stages, numbers], kind="stable")
        turn[stages[order], numbers[order]] = np.arange(len(order))
        candidates.append(len(order))
    # Where only the limit says what leaves, a rank with room for all needs none for what comes and goes.
    roomy = (_needs(base, np.zeros_like(leaves)) <= base.most) & (base.copies.stages == 0)
    wanted = np.where(roomy, base.most, base.most - transit * base.largest)
    # All ranks bisect at once, each for how many of its candidates must leave: what one lets go of does not
    # change what another holds.
    low, high = np.zeros(base.shape.ranks, np.int64), np.array(candidates, np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        fits = _kept(base, chosen | (turn < middle[placement][:, None])) <= wanted
        low, high = np.where(fits, low, np.minimum(middle + 1, high)), np.where(fits, middle, high)
    found: Bools = chosen | (turn < low[placement][:, None])
    return found


def _limits(base: _Base, copied: Bools) -> Iterator[Floats]:
    least, kept = _needs(base, copied), _kept(base, copied)
    if base.copies.strict and (least > base.most).any():
        rank = int(np.argmax(least > base.most))
        raise ScheduleError(
            f"rank {rank} holds {least[rank] / base.largest[rank]:g} residuals of a stage at once, whatever "
            f"is copied; its limit is {base.copies.held:g}",
            hint="raise the limit, or choose an order that computes W right behind I, such as gis or po",
        )
    for extra in (IN_TRANSIT - 1, IN_TRANSIT, IN_TRANSIT + 1)[: 3 if base.limited else 2]:
        yield np.maximum(least, np.minimum(base.most, kept + extra * base.largest))


def _needs(base: _Base, copied: Bools) -> Floats:
    """Bytes that each rank holds at least, if copies take neither time nor room."""
    return _row_peaks(base, held_bytes(base.columns, base.lives, base.sizes, copied))


def _kept(base: _Base, copied: Bools) -> Floats:
    """Bytes of what is not copied that each rank holds at most."""
    kept = Lives(*(np.where(copied, -1, entries) for entries in base.lives))
    return _row_peaks(base, held_bytes(base.columns, kept, base.sizes, np.zeros_like(copied)))


def _row_peaks(base: _Base, held: Floats) -> Floats:
    rows = pairwise(base.columns.offsets.tolist())
    return np.array([held[low:high].max(initial=0.0) for low, high in rows])


def _placed(base: _Base, copied: Bools, limits: Floats, margin: float) -> Columns:
    columns, sizes, lives = base.columns, base.sizes, base.lives
    held = held_bytes(columns, lives, sizes, copied)
    comes = np.where(columns.kind == F_, sizes.residual[columns.stage], 0.0)
    begin_s = _latest_starts(base, copied, margin)
    parts = []
    for rank, (low, high) in enumerate(pairwise(columns.offsets.tolist())):
        stages, numbers = np.nonzero(copied & (np.array(base.shape.placement) == rank)[:, None])
        order = np.argsort(lives.back[stages, numbers])
        stages, numbers = stages[order], numbers[order]
        forward, back = (entries[stages, numbers] - low for entries in (lives.forward, lives.back))
        items = RankItems(forward, back, sizes.copied[stages])
        count, limit = len(back), float(limits[rank])
        before_s = np.concatenate(([0.0], base.end[low:high]))[:-1]
        wanted = np.searchsorted(before_s, begin_s[stages, numbers], side="right") - 1
        reload, row_held = np.zeros(count, np.int64), held[low:high].copy()
        largest = float(items.size.max(initial=0.0))
        find_reloads(items, wanted.astype(np.int64), limit - largest, row_held, reload)
        of_forward = np.full(high - low, -1, np.int64)
        of_forward[forward] = np.arange(count)
        work = Work(np.zeros(count, np.int64), np.zeros(count, np.int64))
        inserts = RowInserts(*(np.zeros(3 * count, np.int64) for _ in range(3)))
        made = find_inserts(items, (of_forward, comes[low:high], row_held), reload, limit, work, inserts)
        at, code, item = (column[:made] for column in inserts)
        parts.append((at + low, code, stages[item], numbers[item]))
    kinds = columns.kinds
    assert all(kinds.index(kind) == CODE[kind] for kind in COPYING), "they have the same codes in all columns"
    return columns.insert(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _latest_starts(base: _Base, copied: Bools, margin: float) -> Floats:
    """(stages, micro-batches): when each RELOAD has to begin at the latest, so that all are in time."""
    begin_s = np.zeros(copied.shape)
    stages, numbers = np.nonzero(copied)
    seconds = np.array([cost.reload_s for cost in base.shape.costs])
    due = base.start[base.lives.back[stages, numbers]] - margin * seconds[stages]
    order = np.argsort(-due, kind="stable")
    ranks = np.array(base.shape.placement)[stages]
    own = np.full(base.shape.ranks, np.inf)
    uplink = np.full(max(base.uplinks.of_rank) + 1, np.inf)
    found = np.zeros(len(due))
    of_rank = np.array(base.uplinks.of_rank)
    _slots(
        (order, due, ranks.astype(np.int64), of_rank[ranks].astype(np.int64)),
        (seconds[stages], np.array(base.uplinks.seconds)[stages]),
        (own, uplink),
        found,
    )
    begin_s[stages, numbers] = found
    return begin_s


@kernel
def _slots(
    items: tuple[Longs, Floats, Longs, Longs],
    seconds: tuple[Floats, Floats],
    free: tuple[Floats, Floats],
    found: Floats,
) -> None:
    """Fill in when each item begins, from the one that is due last to the first.

    items: order, when due, ranks, uplinks.  seconds: of the copy, of the uplink.  free: until when each
    rank's lane and each uplink are free.
    """
    # From the end of the step to its beginning, each as late as it can be:
    #
    #     lane      ...|<- copy ->|<- copy ->|.....|<- copy ->|  due     begin = min(due, lane free) - copy,
    #     uplink    ...|<-->|.....|<-->|...........|<-->|                or uplink free - its part, if earlier
    #
    order, due, ranks, uplinks = items
    copy_s, uplink_s = seconds
    own, shared = free
    for item in order:
        rank, uplink = ranks[item], uplinks[item]
        begin = min(min(due[item], own[rank]) - copy_s[item], shared[uplink] - uplink_s[item])
        found[item] = begin
        own[rank] = begin
        shared[uplink] = begin
