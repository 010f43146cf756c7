"""Which residuals to recompute or offload so that a stage keeps its cap: the greedy choice.

    1. Offload what fits beside the stage's computing, first what would take longest per byte to make again.
    2. Then, at the moment of the peak, pick the largest benefit per second: bytes freed at that moment, over
       the seconds that recomputing adds (ops that already run again cost nothing more), or over those that a
       reload takes beyond what is hidden. Sweep again, and so on.
    3. A pick that frees all that is left may be better than the next pick and those after it: the cheapest
       such end is tried as well.
    4. Picks that are no longer needed are dropped, first those that save most seconds per byte.
    5. Where that fails, or costs more than a little, the same from choices of checkpoints
       (checkpoints.py); the best of all is taken.

What recomputing frees depends on what else is dropped. A residual from which others are made again is a
checkpoint: without it, what lies on both sides of it is made again at once, at a moment that may then need
more than the cap. Such a pick is taken back: no moment may rise above the cap, or further above it. Among
equals the earliest is picked, so that checkpoints stay where fewest lie in front of them: the stretches
between them grow shorter from the first to the last, as is best.

Time grows with (picks) x (ops and chains of the stage).

The kernels know the stage as `StageArrays`, and its residuals as `GreedyState`:

    worst moment  ->  worth of each residual there  ->  treat the best  ->  sweep again
         ^                                                                     |
         +------------- until the peak keeps the allowance --------------------+
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...ir.kernels import kernel
from ..stage_cost.recompute_liveness import (
    AGAIN,
    AT,
    AWAY,
    BACKWARD,
    DROPPED,
    EARLIER,
    EDGE,
    FIRST_AT,
    FORWARD,
    HELD,
    KEEP,
    LAST_IN,
    MESSAGE,
    OFFLOAD,
    OTHERS,
    PENDING,
    RECOMPUTE,
    SAVER,
    SEARCHED,
    RecomputeLiveness,
    StageArrays,
    of_others,
    peak_of,
)
from ..stage_cost.tensors import Array, Indices
from .checkpoints import choose_checkpoints

CHOICE, STORAGE, TOP, MAY, OPTION, BANNED = range(6)
"""Rows of numbers by residual: its treatment, its storage, the last op that saves it, whether it may be
recomputed, what else may become of it, whether recomputing it is out of the question."""

SIZE, BESIDES, WORTH, ADDED, LEAST = range(5)
"""Rows of figures by residual: bytes, seconds of cheap ops of its chain; of what else may become of it bytes
freed per second, and seconds added; a peak that the stage does not get below if it is kept again."""

ALLOWANCE, PER_OFFLOADED, HIDDEN, MOST, S_PER_BYTE, SECONDS, PEAK = range(7)
"""The limits, as in `TreatmentProblem`; then what the choice adds to the stage's time, and its peak."""


class ChainArrays(NamedTuple):
    """The chain of residual k is the ops `ops[first[k] : first[k + 1]]`, from the stage's first op.

    seconds: (ops,), of each op's forward.  users: (ops,), how many recomputed residuals want it.
    """

    first: Indices
    ops: Indices
    seconds: Array
    users: Indices


class GreedyState(NamedTuple):
    """What the greedy choice knows of a stage's residuals, and what it has chosen so far.

    numbers, figures: (rows, residuals), see `CHOICE`, `SIZE`.  sums: see `HELD`.  limits: see `ALLOWANCE`.
    """

    chains: ChainArrays
    numbers: Indices
    figures: Array
    sums: Array
    limits: Array


@kernel
def _worst_moment(stage: StageArrays, sums: Array) -> tuple[int, int]:
    """The row and the op of the moment that needs most; the stage's end for one between ops. Levels from
    `EARLIER` on become what each needs."""
    start, end, _, _, levels, _ = stage
    others, own = of_others(sums), sums[HELD] - sums[AGAIN]
    row, op, most = FORWARD, end, others + own + sums[MESSAGE] + sums[EDGE]
    if others + own + sums[MESSAGE + 1] + sums[EDGE + 1] > most:
        row, most = BACKWARD, others + own + sums[MESSAGE + 1] + sums[EDGE + 1]
    for side in range(2):
        for p in range(end - 1, start - 1, -1):
            here = levels[FORWARD + side, p] + others + sums[EDGE + side]
            levels[EARLIER + side, p] = here
            if here > most:
                row, op, most = FORWARD + side, p, here
    return row, op


@kernel
def _does_good(row: int, op: int, stage: StageArrays, plan: GreedyState) -> bool:
    """Whether that moment needs less than before, and none more than both before and the limit."""
    start, end, _, _, levels, _ = stage
    sums, allowance = plan.sums, plan.limits[ALLOWANCE]
    others, slack = of_others(sums), 1e-9 * abs(allowance)
    for side in range(2):
        for p in range(start, end):
            here = levels[FORWARD + side, p] + others + sums[EDGE + side]
            before = levels[EARLIER + side, p]
            if here > max(allowance, before) + slack:
                return False
            if FORWARD + side == row and p == op and here >= before - slack:
                return False
    return True


@kernel
def _freed(k: int, row: int, op: int, stage: StageArrays, plan: GreedyState) -> float:
    """Bytes that dropping residual k frees at a moment, less what is then made again earlier for it."""
    start, end, forward, marks, _, ahead = stage
    (reads_first, reads), (makes_first, makes), _, _, size, made, last, _ = forward
    _, numbers, figures, sums, _ = plan
    s = numbers[STORAGE, k]
    others = sums[OTHERS + 1] if numbers[CHOICE, k] == OFFLOAD else sums[OTHERS]
    freed: float = others * figures[SIZE, k]
    if row == FORWARD:
        gone = made[s] < op and marks[LAST_IN, s] < op and last[s] < end
        return freed + float(figures[SIZE, k]) if gone else freed
    if ahead > 0:
        return freed
    if max(numbers[TOP, k], marks[FIRST_AT, s]) < op:
        return freed + float(figures[SIZE, k])
    # Some backward needs it at this op, or earlier: it is there all the same. Its chain then runs so early as
    # well. Dropped residuals that it makes, and that so far are made later, are then there too: these bytes
    # are taken off.
    count = 0
    marks[SEARCHED, -1] += 1
    if made[s] >= 0 and marks[AT, made[s]] < op:
        marks[PENDING, 0] = made[s]
        marks[SEARCHED, made[s]] = marks[SEARCHED, -1]
        count = 1
    while count > 0:
        count -= 1
        c = marks[PENDING, count]
        for i in range(makes_first[c], makes_first[c + 1]):
            if marks[DROPPED, makes[i]] > 0:
                freed -= size[makes[i]]
        for i in range(reads_first[c], reads_first[c + 1]):
            r, m = reads[i], made[reads[i]]
            gone = marks[SAVER, r] < 0 or marks[DROPPED, r] > 0
            if start <= m < end and gone and marks[AT, m] < op and marks[SEARCHED, m] != marks[SEARCHED, -1]:
                marks[SEARCHED, m] = marks[SEARCHED, -1]
                marks[PENDING, count] = m
                count += 1
    return freed


@kernel
def _again_s(k: int, plan: GreedyState) -> float:
    """Seconds that making residual k again adds to what runs again already."""
    (first, ops, seconds, users), _, figures, _, _ = plan
    added_s: float = figures[BESIDES, k]
    for i in range(first[k], first[k + 1]):
        if users[ops[i]] == 0:
            added_s += seconds[ops[i]]
    return added_s


@kernel
def _away_s(more: float, plan: GreedyState) -> float:
    """Seconds that offloading so many bytes more adds."""
    away, hidden = plan.sums[AWAY], plan.limits[HIDDEN]
    return float((max(0.0, away + more - hidden) - max(0.0, away - hidden)) * plan.limits[S_PER_BYTE])


@kernel
def treat(k: int, stage: StageArrays, plan: GreedyState) -> None:
    """Treat residual k as its option says; what was done to it becomes the option."""
    (first, ops, _, users), numbers, figures, sums, limits = plan
    size, now, treatment = figures[SIZE, k], numbers[CHOICE, k], numbers[OPTION, k]
    # An op that several chains share runs once: it costs with the first that wants it, and no more with the
    # last gone. So `_again_s` is asked while this chain is not counted among the users.
    if now == RECOMPUTE:
        for i in range(first[k], first[k + 1]):
            users[ops[i]] -= 1
        limits[SECONDS] -= _again_s(k, plan)
        sums[AGAIN] -= size
    elif now == OFFLOAD:
        limits[SECONDS] += _away_s(-size, plan)
        sums[AWAY] -= size
    if treatment == RECOMPUTE:
        limits[SECONDS] += _again_s(k, plan)
        for i in range(first[k], first[k + 1]):
            users[ops[i]] += 1
        sums[AGAIN] += size
    elif treatment == OFFLOAD:
        limits[SECONDS] += _away_s(size, plan)
        sums[AWAY] += size
    stage.marks[DROPPED, numbers[STORAGE, k]] = 1 if treatment == RECOMPUTE else 0
    numbers[CHOICE, k] = treatment
    numbers[OPTION, k] = now


@kernel
def _weigh_options(row: int, op: int, stage: StageArrays, plan: GreedyState) -> None:
    """What treating each residual is worth per second at a moment, and how. One that frees all that is left
    in no more time than the best is worth more than any."""
    _, numbers, figures, sums, limits = plan
    ends, end_s = -1, np.inf
    for k in range(figures.shape[1]):
        figures[WORTH, k] = -1.0
        now, size, most = numbers[CHOICE, k], figures[SIZE, k], 0.0
        if now != RECOMPUTE and numbers[MAY, k] > 0 and numbers[BANNED, k] == 0:
            most = _freed(k, row, op, stage, plan)
            added = _again_s(k, plan) + (_away_s(-size, plan) if now == OFFLOAD else 0.0)
            if most > 0:
                figures[WORTH, k] = most / added if added > 0 else np.inf
                figures[ADDED, k] = added
                numbers[OPTION, k] = RECOMPUTE
        if now == KEEP and limits[PER_OFFLOADED] > 0 and sums[AWAY] + size <= limits[MOST]:
            freed, added = limits[PER_OFFLOADED] * size, _away_s(size, plan)
            worth = freed / added if added > 0 else np.inf
            if worth > figures[WORTH, k]:
                most = freed
                figures[WORTH, k] = worth
                figures[ADDED, k] = added
                numbers[OPTION, k] = OFFLOAD
        if figures[WORTH, k] > 0 and limits[PEAK] - most <= limits[ALLOWANCE] and figures[ADDED, k] < end_s:
            ends, end_s = k, figures[ADDED, k]
    best = _best(plan)
    if ends >= 0 and end_s <= figures[ADDED, best]:
        figures[WORTH, ends] = np.inf


@kernel
def _best(plan: GreedyState) -> int:
    """The residual whose worth is largest, -1 if none is worth anything."""
    figures = plan.figures
    pick, most = -1, -1.0
    for k in range(figures.shape[1]):
        worth = figures[WORTH, k]
        larger = worth == most == np.inf and figures[SIZE, k] > figures[SIZE, pick]
        if worth > most or larger:
            pick, most = k, worth
    return pick


@kernel
def _take_best(row: int, op: int, stage: StageArrays, plan: GreedyState) -> int:
    """Apply the option that is worth most, of those that do good. Returns its residual, -1 for none."""
    _, numbers, figures, sums, limits = plan
    pick = _best(plan)
    while pick >= 0:
        treat(pick, stage, plan)
        limits[PEAK] = peak_of(stage, sums)
        if numbers[CHOICE, pick] == OFFLOAD or _does_good(row, op, stage, plan):
            break
        treat(pick, stage, plan)
        figures[WORTH, pick] = -1.0
        numbers[BANNED, pick] = 1
        pick = _best(plan)
    return pick


@kernel
def _longer_held(k: int, at: int, stage: StageArrays, plan: GreedyState) -> float:
    """Bytes that may be there behind the op `at` only because residual k is made again in front of its
    backward: what its chain reads that is there so early, and that no backward so late reads."""
    start, _, forward, marks, _, _ = stage
    (reads_first, reads), size, made = forward.reads, forward.size, forward.made
    first, ops, _, _ = plan.chains
    longer = 0.0
    for i in range(first[k], first[k + 1]):
        for r in range(reads_first[start + ops[i]], reads_first[start + ops[i] + 1]):
            s = reads[r]
            there = marks[AT, made[s]] if made[s] >= start else marks[FIRST_AT, s]
            if marks[SAVER, s] > at or (marks[SAVER, s] < 0 and there > at):
                longer += size[s]
    return longer


@kernel
def least_peaks(stage: StageArrays, plan: GreedyState) -> None:
    """Write of each residual that is treated a peak that the stage does not get below if it is kept again.

    Levels, marks and the peak must be those of the present choice. Kept, the residual is there in the forward
    behind its last reader, and in the backward until the first op that needs it made again; what was held
    there for its chain may be gone, nothing else. Levels from `EARLIER` on become the most from each op on.
    """
    start, end, forward, marks, levels, ahead = stage
    made, last = forward.made, forward.last
    _, numbers, figures, sums, limits = plan
    # Running maxima from behind answer "the most from op p on" for all residuals in one pass. A bound above
    # the allowance saves the sweep that would show it.
    others, own = of_others(sums), sums[HELD] - sums[AGAIN]
    for side in range(2):
        most = -np.inf
        for p in range(end - 1, start - 1, -1):
            most = max(most, levels[FORWARD + side, p])
            levels[EARLIER + side, p] = most
    for k in range(figures.shape[1]):
        s, size = numbers[STORAGE, k], figures[SIZE, k]
        if numbers[CHOICE, k] == OFFLOAD:
            figures[LEAST, k] = limits[PEAK] + (sums[OTHERS] - sums[OTHERS + 1]) * size
        elif numbers[CHOICE, k] == RECOMPUTE:
            forward_most = max(levels[EARLIER, start], own + size + sums[MESSAGE])
            gone = max(marks[LAST_IN, s], made[s]) + 1
            if start < gone < end and (made[s] < 0 or last[s] < end):
                forward_most = max(forward_most, levels[EARLIER, gone] + size)
            backward_most = own + size + sums[MESSAGE + 1]
            if ahead > 0:
                backward_most = max(backward_most, levels[EARLIER + 1, start])
            elif made[s] >= start and marks[AT, made[s]] + 1 < end:
                at = marks[AT, made[s]]
                held = _longer_held(k, at, stage, plan)
                backward_most = max(backward_most, levels[EARLIER + 1, at + 1] + size - held)
            most = max(forward_most + sums[EDGE], backward_most + sums[EDGE + 1])
            figures[LEAST, k] = others + sums[OTHERS] * size + most


@kernel
def _relieve(stage: StageArrays, plan: GreedyState) -> bool:
    """Keep again for good the residual without which the peak is lowest: a checkpoint. False if it is lower
    without none. Sweeps only where bounds leave it open; they are as exact as peaks, of whole bytes."""
    _, numbers, figures, sums, limits = plan
    least_peaks(stage, plan)
    pick, lowest = -1, limits[PEAK] * (1 - 1e-9)
    while True:
        k, least = -1, np.inf
        # Least bound first: once that is above the lowest peak found, no other residual can give a lower one.
        for other in range(figures.shape[1]):
            if numbers[CHOICE, other] == RECOMPUTE and figures[LEAST, other] < least:
                k, least = other, figures[LEAST, other]
        if k < 0 or least > lowest or (pick < 0 and least == lowest):
            break
        figures[LEAST, k] = np.inf
        numbers[OPTION, k] = KEEP
        treat(k, stage, plan)
        peak = peak_of(stage, sums)
        treat(k, stage, plan)
        if peak < lowest or (pick > k and peak == lowest):
            pick, lowest = k, peak
    if pick >= 0:
        numbers[BANNED, pick] = 2
        numbers[OPTION, pick] = KEEP
        treat(pick, stage, plan)
    limits[PEAK] = peak_of(stage, sums)
    return pick >= 0


@kernel
def _spare(stage: StageArrays, plan: GreedyState) -> None:
    """Keep again what need not be treated, until nothing more may be: first what saves most per byte."""
    _, numbers, figures, sums, limits = plan
    most = limits[ALLOWANCE]
    least_peaks(stage, plan)
    changed = True
    while changed:
        changed = False
        for k in range(figures.shape[1]):
            figures[WORTH, k] = -1.0
            numbers[OPTION, k] = KEEP
            if numbers[CHOICE, k] != KEEP:
                before = limits[SECONDS]
                treat(k, stage, plan)
                saved = max(0.0, before - limits[SECONDS])
                figures[WORTH, k] = saved / max(figures[SIZE, k], 1.0)
                treat(k, stage, plan)
        pick = _best(plan)
        while pick >= 0:
            figures[WORTH, pick] = -1.0
            if figures[LEAST, pick] <= most + 1e-9 * abs(most):
                treat(pick, stage, plan)
                peak = peak_of(stage, sums)
                if peak <= most:
                    limits[PEAK] = peak
                    changed = True
                    least_peaks(stage, plan)
                else:
                    treat(pick, stage, plan)
            pick = _best(plan)


@kernel
def pick_all(begin: Indices, stage: StageArrays, plan: GreedyState) -> bool:
    """Make the choice, with one to begin with; False if it does not keep the allowance."""
    _, numbers, _, sums, limits = plan
    for k in range(len(begin)):
        if begin[k] != KEEP:
            numbers[OPTION, k] = begin[k]
            treat(k, stage, plan)
    limits[PEAK] = peak_of(stage, sums)
    fresh = True
    while limits[PEAK] > limits[ALLOWANCE]:
        row, op = _worst_moment(stage, sums)
        _weigh_options(row, op, stage, plan)
        if _take_best(row, op, stage, plan) >= 0:
            fresh = False
            continue
        limits[PEAK] = peak_of(stage, sums)
        if fresh and not _relieve(stage, plan):
            return False
        for k in range(numbers.shape[1]):  # what did no good before may do now
            numbers[BANNED, k] = 2 if numbers[BANNED, k] == 2 else 0
        fresh = True
    _spare(stage, plan)
    return True


FINISHED = 3
"""Of the choices of checkpoints that fit, how many are finished greedily."""

FEW_RESIDUALS = 32
"""Residuals of a stage up to which all are, if none fits."""

CHEAP = 0.01
"""Share of the stage's forward below which what a choice adds is not worth another try."""


@dataclass(frozen=True, kw_only=True)
class TreatmentProblem:
    """What to reach. Sizes in bytes.

    allowance: what the stage may hold besides static bytes.  per_offloaded: copies freed per residual that is
        offloaded; 0 where none may be.
    hidden: bytes whose copies cost no time.  most: that may be offloaded at all.
    s_per_byte: of what is offloaded beyond `hidden`.  may: residual -> whether it may be recomputed.
    """

    moments: RecomputeLiveness
    allowance: float
    per_offloaded: float
    hidden: float
    most: float
    s_per_byte: float
    may: Indices


class TreatmentChoice(NamedTuple):
    """A choice.

    fails: whether it does not keep the allowance, but only needs little.  seconds: what it adds.  peak: bytes
    besides static ones.
    """

    fails: bool
    seconds: float
    peak: float
    choice: Indices

    def better(self, other: TreatmentChoice) -> bool:
        """Whether it fits and is faster, or else needs less."""
        if self.fails and other.fails:
            return self.peak < other.peak
        return (self.fails, self.seconds) < (other.fails, other.seconds)


Solver = Callable[[TreatmentProblem], TreatmentChoice]


def choose_greedily(task: TreatmentProblem) -> TreatmentChoice:
    """A choice that keeps the allowance, or as little as was reached."""
    found = _from_nothing(task)
    little = CHEAP * float(task.moments.residuals.seconds.sum())
    return found if not found.fails and found.seconds <= little else _from_checkpoints(task, found)


def _from_nothing(task: TreatmentProblem) -> TreatmentChoice:
    """From everything kept, with what is offloaded for nothing chosen in two ways."""
    residuals, peak = task.moments.residuals, task.moments.peak(np.full(len(task.may), KEEP))
    dear = np.where(task.may > 0, residuals.alone_s / np.maximum(residuals.size, 1.0), np.inf)
    need = peak - task.allowance
    nothing = np.full(len(task.may), KEEP, np.int64)
    found = _solved(task, first := _offloaded(task, nothing, need, np.lexsort((-residuals.size, -dear))))
    if not first.any() or not (found.fails or found.seconds > 0):
        return found
    second = _solved(task, _offloaded(task, nothing, need, np.argsort(-residuals.size, kind="stable")))
    return second if second.better(found) else found


def _from_checkpoints(task: TreatmentProblem, found: TreatmentChoice) -> TreatmentChoice:
    """The better of what was found and of what comes of choosing checkpoints first: of the fastest choices
    that fit; where none does, of the one that needs least, and of all if the stage is small."""
    order = np.argsort(-task.moments.residuals.size, kind="stable")
    begun = []
    for choice in choose_checkpoints(task.moments, task.may):
        own = _offloaded(task, choice, np.inf, order)
        peak = task.moments.peak(own)
        begun.append(TreatmentChoice(peak > task.allowance, seconds_of(task, own), peak, own))
    begun.sort(key=lambda one: (one.fails, one.peak if one.fails else one.seconds))
    fitting = [one for one in begun if not one.fails][:FINISHED]
    for one in fitting or begun[: len(begun) if len(task.may) <= FEW_RESIDUALS else 1]:
        other = _solved(task, one.choice)
        found = other if other.better(found) else found
    return found


def seconds_of(task: TreatmentProblem, choice: Indices) -> float:
    """What a choice adds to the stage's time."""
    residuals = task.moments.residuals
    away = float(residuals.size[choice == OFFLOAD].sum())
    return residuals.recompute_s(choice) + max(0.0, away - task.hidden) * task.s_per_byte


def _solved(task: TreatmentProblem, begin: Indices) -> TreatmentChoice:
    stage, plan = task.moments.stage, greedy_state(task)
    fits = pick_all.form(4 * len(begin) * (task.moments.end - task.moments.start))(begin, stage, plan)
    _, numbers, _, _, limits = plan
    return TreatmentChoice(not fits, float(limits[SECONDS]), float(limits[PEAK]), numbers[CHOICE])


def greedy_state(task: TreatmentProblem) -> GreedyState:
    """What kernels see of a task besides its stage. Sets every residual to kept."""
    moments, residuals = task.moments, task.moments.residuals
    count = len(residuals)
    numbers, figures = np.zeros((BANNED + 1, count), np.int64), np.zeros((LEAST + 1, count))
    numbers[STORAGE], numbers[TOP], numbers[MAY] = residuals.storage, residuals.top + moments.start, task.may
    figures[SIZE], figures[BESIDES] = residuals.size, residuals.besides
    limits = np.array([task.allowance, task.per_offloaded, task.hidden, task.most, task.s_per_byte, 0.0, 0.0])
    users = np.zeros(len(residuals.seconds), np.int64)
    chains = ChainArrays(*residuals.chain, residuals.seconds, users)
    moments.stage.marks[DROPPED] = 0
    return GreedyState(chains, numbers, figures, moments.sums(np.full(count, KEEP, np.int64)), limits)


def _offloaded(task: TreatmentProblem, choice: Indices, need: float, order: Indices) -> Indices:
    """The choice, and of what it keeps offloaded what costs no time, in this order, while it is needed."""
    found, sizes = choice.copy(), task.moments.residuals.size
    away, most = 0.0, min(task.hidden, task.most) if task.per_offloaded > 0 else 0.0
    for k in order[choice[order] == KEEP].tolist() if most > 0 else []:
        size = float(sizes[k])
        if away * task.per_offloaded < need and away + size <= most:
            found[k] = OFFLOAD
            away += size
    return found
