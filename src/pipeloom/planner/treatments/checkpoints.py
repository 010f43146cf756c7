"""Stretches of a stage that are made again one after another, between checkpoints: choices to begin with.

The greedy choice (greedy.py) drops one residual after another and may end where no single step helps,
with checkpoints in the wrong places: large ones, or too many. Here the checkpoints are chosen all at once.
A checkpoint at op p keeps every residual that is made in front of p and that something behind it needs: a
backward, or the chain of a residual made there. All between two checkpoints is dropped that may be.

    least(p) = min over i < p of  least(i) + bytes kept at p
               where  least(i) + bytes dropped in [i, p) <= limit

least(i) is what is kept in front of i, and so is there while [i, p) is made again: with one micro-batch in
flight that decides, so that the stretches get shorter towards the end. With more in flight every checkpoint
is held several times, and fewer are best. So several limits are tried, and their peaks swept exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...ir.kernels import kernel
from ..stage_cost.recompute_liveness import KEEP, RECOMPUTE, RecomputeLiveness
from ..stage_cost.tensors import Array, ForwardArrays, Indices, RaggedArray

LIMITS = 40
"""How many limits are tried: shares of all that may be dropped, from 1 down to `LEAST`, in equal ratios."""

LEAST = 0.01


@kernel
def _until(start: int, chain: RaggedArray, forward: ForwardArrays, number: Indices, until: Indices) -> None:
    """Write of each residual the last op that needs it, be that for making another residual again.

    number: storage -> residual, -1 for none.  until: the last ops whose backward reads them.
    """
    first, ops = chain
    (reads_first, reads), made = forward.reads, forward.made
    for k in range(len(first) - 1):
        for i in range(first[k], first[k + 1]):
            last = start + ops[first[k]]  # a chain begins with the maker
            for r in range(reads_first[start + ops[i]], reads_first[start + ops[i] + 1]):
                n = number[reads[r]]
                if n >= 0 and n != k and made[reads[r]] < last:
                    until[n] = max(until[n], last)


@kernel
def _best_places(
    dropped: Array, kept: Array, held: Array, limit: float, found: tuple[Array, Indices]
) -> bool:
    """Choose checkpoints among places 1 .. n, the last of which is the stage's end.

    dropped: bytes that may be dropped of what is made in front of each place.  kept, held: of what a
    checkpoint there keeps those that could be dropped, and all.  found: the least that is held in front of
    each place, and the checkpoint before it.  Returns whether there is a way to the end.
    """
    least, before = found
    least[0] = 0.0
    for j in range(1, len(dropped)):
        least[j] = np.inf
        for i in range(j - 1, -1, -1):
            again = dropped[j] - kept[j] - dropped[i]
            if again > limit:  # it only grows from here on to the left
                break
            if least[i] < least[j] and least[i] + max(again, 0.0) <= limit:
                least[j] = least[i]
                before[j] = i
        least[j] += held[j]
    return bool(least[len(dropped) - 1] < np.inf)


def choose_checkpoints(moments: RecomputeLiveness, may: Indices) -> Iterator[Indices]:
    """Different choices, each with other checkpoints. may: residual -> whether it may be recomputed."""
    residuals, start, end = moments.residuals, moments.start, moments.end
    made, _, _ = moments.lives
    forward = moments.sweep.tensors.forward
    number = np.full(len(forward.size), -1, np.int64)
    number[residuals.storage] = np.arange(len(residuals))
    until = residuals.top + start
    _until.form(len(residuals.chain.items))(start, residuals.chain, forward, number, until)
    inside = made >= start
    places = np.unique(np.concatenate([made[inside] + 1, [end]]))
    places = places[places <= end]
    free = np.where(may > 0, residuals.size, 0.0)
    # A checkpoint keeps what is made in front of it and needed behind: for each residual an interval of
    # places. So one running sum of what begins and ends gives the bytes of all places.
    crossing = [_up_to(weight, made, places, start, until) for weight in (free, residuals.size)]
    kept, held = (np.concatenate([[0.0], own[:-1], [0.0]]) for own in crossing)
    in_front = np.concatenate([[0.0], _up_to(np.where(inside, free, 0.0), made, places, start)])
    least, before = np.zeros(len(in_front)), np.zeros(len(in_front), np.int64)
    seen: set[bytes] = set()
    for share in np.geomspace(1.0, LEAST, LIMITS):
        limit = share * float(in_front[-1])
        if not _best_places.form(len(in_front))(in_front, kept, held, limit, (least, before)):
            continue
        choice = np.where(may > 0, RECOMPUTE, KEEP).astype(np.int64)
        at = int(before[-1])
        while at > 0:
            place = places[at - 1]
            choice[(made < place) & (until >= place)] = KEEP
            at = int(before[at])
        if choice.tobytes() not in seen:
            seen.add(choice.tobytes())
            yield choice


def _up_to(weight: Array, made: Indices, places: Indices, start: int, until: Indices | None = None) -> Array:
    """Of each place the weight of what is made in front of it; if `until` is given, and needed behind it."""
    each = np.zeros(int(places[-1]) - start + 2)
    np.add.at(each, np.maximum(made + 1 - start, 0), weight)
    if until is not None:
        np.add.at(each, until + 1 - start, -weight)
    return np.asarray(np.cumsum(each)[places - start])
