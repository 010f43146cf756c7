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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..stage_cost.arrays import Indices
from ..stage_cost.recompute_liveness import DROPPED, RecomputeLiveness
from ..stage_cost.residuals import KEEP, OFFLOAD
from .checkpoints import choose_checkpoints
from .greedy_kernels import (
    BANNED,
    BESIDES,
    CHOICE,
    LEAST,
    MAY,
    PEAK,
    SECONDS,
    SIZE,
    STORAGE,
    TOP,
    ChainArrays,
    GreedyState,
    pick_all,
)

FINISHED = 3
"""Of the choices of checkpoints that fit, how many are finished greedily."""

SMALL = 32
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
    for one in fitting or begun[: len(begun) if len(task.may) <= SMALL else 1]:
        other = _solved(task, one.choice)
        found = other if other.better(found) else found
    return found


def seconds_of(task: TreatmentProblem, choice: Indices) -> float:
    """What a choice adds to the stage's time."""
    residuals = task.moments.residuals
    away = float(residuals.size[choice == OFFLOAD].sum())
    return residuals.recompute_s(choice) + max(0.0, away - task.hidden) * task.s_per_byte


def _solved(task: TreatmentProblem, begin: Indices) -> TreatmentChoice:
    """What the greedy choice makes of a choice to begin with."""
    stage, plan = task.moments.stage, greedy_state(task)
    fits = pick_all.form(4 * len(begin) * (task.moments.end - task.moments.start))(begin, stage, plan)
    _, numbers, _, _, limits = plan
    return TreatmentChoice(not fits, float(limits[SECONDS]), float(limits[PEAK]), numbers[CHOICE])


def greedy_state(task: TreatmentProblem) -> GreedyState:
    """What kernels see of a task besides its stage (see greedy_kernels.py). Sets every residual to kept."""
    moments, residuals = task.moments, task.moments.residuals
    count = len(residuals)
    numbers, figures = np.zeros((BANNED + 1, count), np.int64), np.zeros((LEAST + 1, count))
    numbers[STORAGE], numbers[TOP], numbers[MAY] = residuals.storage, residuals.top + moments.start, task.may
    figures[SIZE], figures[BESIDES] = residuals.size, residuals.besides
    limits = np.array(
        [
            task.allowance,
            task.per_offloaded,
            task.hidden,
            task.most,
            task.s_per_byte,
            0.0,
            0.0,
        ]
    )
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
