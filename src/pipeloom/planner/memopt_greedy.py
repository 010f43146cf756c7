"""Which residuals to recompute or offload so that enough bytes are freed: the greedy choice.

    1. Offload what fits beside the stage's computing, first what would take longest per byte to make again.
    2. Then pick again and again the largest benefit per second: bytes freed at the peak, over the seconds
       that recomputing it adds (ops that already run again cost nothing more), or over those that its reload
       takes beyond what is hidden.
    3. A pick that frees all that is left may be better than the next pick and those after it: the cheapest
       such end is kept, at every step.
    4. Picks that are no longer needed are dropped, the dearest first.

Time grows with (picks) x (residuals).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ir.kernels import kernel
from .intervals import Indices
from .residuals import KEEP, OFFLOAD, RECOMPUTE, Residuals
from .sweep import run


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to reach. Sizes in bytes.

    need: to be freed.  per_recomputed, per_offloaded: copies freed per residual treated so.
    hidden: bytes whose copies cost no time.  most: that may be offloaded at all.
    s_per_byte: of what is offloaded beyond `hidden`.  may: residual -> whether it may be recomputed.
    """

    need: float
    per_recomputed: float
    per_offloaded: float
    hidden: float
    most: float
    s_per_byte: float
    may: Indices


def greedy(residuals: Residuals, task: Task) -> Indices | None:
    """A choice that frees what is needed; None if there is none."""
    count = len(residuals)
    chains = (*residuals.chain, residuals.seconds, residuals.besides, residuals.size)
    limits = np.array([
        task.need, task.per_recomputed, task.per_offloaded, task.hidden, task.most, task.s_per_byte,
    ])  # fmt: skip
    alone = np.array([residuals.seconds[residuals.chain[k]].sum() for k in range(count)])
    dear = np.where(task.may > 0, (alone + residuals.besides) / np.maximum(residuals.size, 1.0), np.inf)
    order = np.lexsort((-residuals.size, -dear)).astype(np.int64)
    choice, users = np.zeros(count, np.int64), np.zeros(len(residuals.seconds), np.int64)
    state = choice, users, np.zeros(3)
    picks = np.zeros(count + 1, np.int64)
    fits = run(_greedy, 20 * count)(task.may, chains, limits, order, picks, state)
    return choice if fits else None


@kernel
def _added_s(k, chains, users):  # type: ignore[no-untyped-def]
    """Seconds that making residual k again adds to what runs again already."""
    first, ops, seconds, besides, _ = chains
    found = besides[k]
    for i in range(first[k], first[k + 1]):
        if users[ops[i]] == 0:
            found += seconds[ops[i]]
    return found


@kernel
def _offload_s(away, limits):  # type: ignore[no-untyped-def]
    """Seconds that offloading so many bytes adds."""
    return max(0.0, away - limits[3]) * limits[5]


@kernel
def _apply(k, kind, sign, chains, limits, state):  # type: ignore[no-untyped-def]
    """Treat residual k so (sign 1), or keep it again (sign -1).

    state: (choice, ops that run again -> how often they are wanted, [bytes freed, seconds, bytes away]).
    """
    first, ops, _, _, size = chains
    choice, users, level = state
    if kind == RECOMPUTE:
        if sign < 0:
            for i in range(first[k], first[k + 1]):
                users[ops[i]] -= 1
        level[1] += sign * _added_s(k, chains, users)
        if sign > 0:
            for i in range(first[k], first[k + 1]):
                users[ops[i]] += 1
        level[0] += sign * size[k] * limits[1]
    else:
        level[1] -= _offload_s(level[2], limits)
        level[2] += sign * size[k]
        level[1] += _offload_s(level[2], limits)
        level[0] += sign * size[k] * limits[2]
    choice[k] = kind if sign > 0 else KEEP


@kernel
def _prune(picks, count, chains, limits, state):  # type: ignore[no-untyped-def]
    """Keep again what need not be treated: while there is any, the one that saves most time."""
    size, choice, level = chains[4], state[0], state[2]
    while True:
        drop, saves = -1, -1.0
        for i in range(count):
            k = picks[i]
            kind = choice[k]
            if kind == KEEP or level[0] - size[k] * limits[kind] < limits[0]:
                continue
            before = level[1]
            _apply(k, kind, -1, chains, limits, state)
            found = before - level[1]
            _apply(k, kind, 1, chains, limits, state)
            if found > saves:
                drop, saves = k, found
        if drop < 0:
            break
        _apply(drop, choice[drop], -1, chains, limits, state)


@kernel
def _best(may, chains, limits, state, end):  # type: ignore[no-untyped-def]
    """The residual and treatment worth most per second, -1 for none; in `end` the cheapest that would do."""
    size, choice, users, level = chains[4], state[0], state[1], state[2]
    pick, kind, ratio = -1, KEEP, -1.0
    for k in range(len(size)):
        for option in (RECOMPUTE, OFFLOAD):
            if choice[k] != KEEP or limits[option] <= 0:
                continue
            if option == RECOMPUTE:
                if may[k] == 0:
                    continue
                seconds = _added_s(k, chains, users)
            else:
                if level[2] + size[k] > limits[4]:
                    continue
                seconds = _offload_s(level[2] + size[k], limits) - _offload_s(level[2], limits)
            gain = size[k] * limits[option]
            if level[0] + gain >= limits[0] and level[1] + seconds < end[2]:
                end[0], end[1], end[2] = k, option, level[1] + seconds
                end[3] = 1
            worth = gain / seconds if seconds > 0 else np.inf
            if worth > ratio or (worth == ratio and size[k] > size[pick]):
                pick, kind, ratio = k, option, worth
    return pick, kind


@kernel
def _greedy(may, chains, limits, order, picks, state):  # type: ignore[no-untyped-def]
    """Make the choice; False if there is none."""
    need, size, choice, level = limits[0], chains[4], state[0], state[2]
    count = 0
    if limits[OFFLOAD] > 0:
        for k in order:
            if level[0] < need and level[2] + size[k] <= min(limits[3], limits[4]):
                _apply(k, OFFLOAD, 1, chains, limits, state)
                picks[count] = k
                count += 1
    end = np.array([-1.0, KEEP, np.inf, 0.0])
    kept_until = -1
    while level[0] < need:
        end[3] = 0
        pick, kind = _best(may, chains, limits, state, end)
        if end[3] > 0:
            kept_until = count
        if pick < 0:
            return False
        _apply(pick, kind, 1, chains, limits, state)
        picks[count] = pick
        count += 1
    if kept_until >= 0 and end[2] < level[1]:
        while count > kept_until:
            count -= 1
            _apply(picks[count], choice[picks[count]], -1, chains, limits, state)
        picks[count] = int(end[0])
        _apply(picks[count], int(end[1]), 1, chains, limits, state)
        count += 1
    _prune(picks, count, chains, limits, state)
    return True
