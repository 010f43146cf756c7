"""The best treatments of a stage's residuals, found by integer programmes: an oracle for the greedy choice.

HiGHS (scipy.optimize.milp) solves one programme after another until an answer fits.

    least   sum over ops of t_c y_c + sum of b_r x_r + s e
    with    y_c >= x_r                                for each op c of the chain of r
            x_r + o_r <= 1
            e >= sum of size_r o_r - hidden,  sum of size_r o_r <= most

and for each moment that an answer so far has not kept, the level there:

    forward of op p     F_p - sum of size_r x_r of what is dropped by then                  <= allowance
    backward of op p    B_p - sum of size_r (x_r - a_r) of what is not yet freed by then    <= allowance
                        a_r >= x_r            if an op at or behind p saves r
                        a_r' >= a_r + x_r' - 1  for each r' that the chain of r reads or makes
    less what the other micro-batches then hold less, per x_r and o_r

x_r: r is recomputed; o_r: offloaded; y_c: op c runs again; e: bytes not hidden; a_r: r has been made again by
then. y, e and a take the right values by themselves. What such a moment leaves out (values between residuals,
sources that wait for a chain, scratch of chains) makes a programme only easier. So an answer that fits is the
best one; one that does not, although its worst moment is known, is excluded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from pipeloom.planner.stage_cost.recompute_liveness import (
    AGAIN,
    BACKWARD,
    EDGE,
    FORWARD,
    HELD,
    KEEP,
    KEPT_UNTIL,
    MESSAGE,
    OFFLOAD,
    OTHERS,
    RECOMPUTE,
    of_others,
)
from pipeloom.planner.stage_cost.tensors import Array, Indices
from pipeloom.planner.treatments.greedy import TreatmentChoice, TreatmentProblem, choose_greedily, seconds_of

LIMIT_S = 30.0

AT_ONCE = 4
"""Moments that are added after each answer, at most."""


def exact(task: TreatmentProblem, limit_s: float = LIMIT_S) -> TreatmentChoice:
    """The choice that keeps the allowance in least time; the greedy one if it is not found within limit_s."""
    end = perf_counter() + limit_s
    programme = _Programme(task)
    while (left := end - perf_counter()) > 0:
        choice = programme.solved(left)
        if choice is None:
            return choose_greedily(task)
        if (peak := task.moments.peak(choice)) <= task.allowance:
            return TreatmentChoice(False, seconds_of(task, choice), peak, choice)
        programme.exclude(choice)
    return choose_greedily(task)


@dataclass
class _Rows:
    """Rows of a constraint matrix."""

    entries: list[tuple[int, int, float]] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)

    def add(
        self, columns: list[int], weights: list[float], *, least: float = -np.inf, most: float = np.inf
    ) -> None:
        row, scale = len(self.bounds), max(map(abs, weights), default=1.0) or 1.0
        self.entries += [(row, int(c), float(w) / scale) for c, w in zip(columns, weights, strict=True)]
        self.bounds.append((least / scale, most / scale))

    def constraint(self, columns: int) -> LinearConstraint:
        row, column, weight = map(np.array, zip(*self.entries, strict=True))
        matrix = coo_array((weight, (row, column)), shape=(len(self.bounds), columns)).tocsr()
        least, most = map(np.array, zip(*self.bounds, strict=True))
        return LinearConstraint(matrix, least, most)


class _Programme:
    """Columns: x, o, y, e, and the a of one moment after another."""

    def __init__(self, task: TreatmentProblem) -> None:
        self.task = task
        moments = self.moments = task.moments
        residuals = self.residuals = moments.residuals
        self.count = count = len(residuals)
        self.ops = np.unique(residuals.chain.items)
        self.first = 2 * count + len(self.ops) + 1
        self.known: set[tuple[int, int]] = set()
        self.rows = _Rows()
        size = residuals.size
        column = np.searchsorted(self.ops, residuals.chain.items) + 2 * count
        owner = np.repeat(np.arange(count), np.diff(residuals.chain.first))
        for op, k in zip(column.tolist(), owner.tolist(), strict=True):
            self.rows.add([op, k], [1.0, -1.0], least=0.0)
        for k in range(count):
            self.rows.add([k, count + k], [1.0, 1.0], most=1.0)
        offloads = list(range(count, 2 * count))
        self.rows.add([self.first - 1, *offloads], [1.0, *-size], least=-task.hidden)
        self.rows.add(offloads, [*size], most=task.most)
        kept, away = moments.kept_sums[OTHERS:]
        self.others = kept * size, (kept - away) * size
        self.implied = self._implied()

    def _implied(self) -> list[set[int]]:
        """Of each residual those that its chain reads or makes: dropped ones are then there as well."""
        tensors, start = self.moments.sweep.tensors.forward, self.moments.start
        number = {int(s): k for k, s in enumerate(self.residuals.storage)}
        found = []
        for k in range(self.count):
            ops = (self.residuals.chain[k] + start).tolist()
            touched = {int(s) for op in ops for s in (*tensors.reads[op], *tensors.makes[op])}
            found.append({number[s] for s in touched if s in number} - {k})
        return found

    def solved(self, seconds: float) -> Indices | None:
        """The best choice by what is known of moments; None if there is none, or none in time."""
        count, residuals, task = self.count, self.residuals, self.task
        more = self.first + count * sum(side == 1 for side, _ in self.known)
        spare = np.zeros(more - self.first)
        cost = np.concatenate(
            [residuals.besides, np.zeros(count), residuals.seconds[self.ops], [task.s_per_byte], spare]
        )
        upper = np.concatenate(
            [
                task.may,
                np.full(count, float(task.per_offloaded > 0)),
                np.ones(len(self.ops)),
                [np.inf],
                spare + 1,
            ]
        )
        whole = np.concatenate([np.ones(2 * count), np.zeros(more - 2 * count)])
        scale = cost.max() or 1.0
        found = milp(
            cost / scale,
            integrality=whole,
            bounds=Bounds(0.0, upper),
            constraints=self.rows.constraint(more),
            options={"time_limit": seconds, "mip_rel_gap": 1e-9},
        )
        if found.x is None or found.status != 0:
            return None
        chosen = np.round(found.x[: 2 * count]).astype(bool)
        choice = np.where(chosen[:count], RECOMPUTE, np.where(chosen[count:], OFFLOAD, KEEP))
        return choice.astype(np.int64)

    def exclude(self, choice: Indices) -> None:
        """Add the worst moments of a choice that does not fit; if all are known, exclude the choice."""
        worst = self._exceeded(choice)
        new = [moment for moment in worst if moment not in self.known]
        for moment in new[:AT_ONCE]:
            self._add(*moment)
        if not new:
            self._forbid(choice)

    def _levels(self, choice: Indices) -> tuple[Array, Array]:
        """What each moment needs, (forward, backward) x ops of the stage; and the same at the ends."""
        moments = self.moments
        sums = moments.sums(choice)
        moments.highest_levels(choice)
        found = moments.stage.levels[[FORWARD, BACKWARD], moments.start : moments.end]
        edge, message = sums[EDGE:MESSAGE], sums[MESSAGE:OTHERS]
        others = float(of_others(sums))
        return found + others + edge[:, None], sums[HELD] - sums[AGAIN] + others + message + edge

    def _exceeded(self, choice: Indices) -> list[tuple[int, int]]:
        """(0 forward or 1 backward, op) above the allowance, the worst first; its length for the end."""
        found, ends = self._levels(choice)
        both = np.concatenate([found, ends[:, None]], axis=1)
        order = np.argsort(-both, axis=None)
        above = order[both.ravel()[order] > self.task.allowance]
        return [(int(i) // both.shape[1], int(i) % both.shape[1]) for i in above]

    def _add(self, side: int, op: int) -> None:
        """The rows of one moment."""
        keep = np.zeros(self.count, np.int64)
        found, ends = self._levels(keep)
        length, size, count = found.shape[1], self.residuals.size, self.count
        columns = list(range(2 * count))
        per_x, per_o = self.others
        self.known.add((side, op))
        made, last_in, saver = self.moments.lives
        if op == length:
            self.rows.add(columns, [*(per_x + size), *per_o], least=ends[side] - self.task.allowance)
            return
        place = op + self.moments.start
        if side == 0:
            sent = self.moments.sweep.tensors.forward.last[self.residuals.storage] >= self.moments.end
            gone = (made < place) & (last_in < place) & ~sent
            self.rows.add(columns, [*(per_x + size * gone), *per_o], least=found[0, op] - self.task.allowance)
            return
        first = self.first + count * (sum(s == 1 for s, _ in self.known) - 1)
        alive = size * (saver <= place)
        levels = self.moments.stage.levels
        before = levels[KEPT_UNTIL, place] + found[1, op] - levels[BACKWARD, place]
        self.rows.add(
            [*columns, *range(first, first + count)],
            [*(per_x + alive), *per_o, *-alive],
            least=before - self.task.allowance,
        )
        for k in range(count):
            if self.residuals.top[k] >= op:
                self.rows.add([first + k, k], [1.0, -1.0], least=0.0)
            for other in self.implied[k]:
                self.rows.add([first + other, first + k, other], [1.0, -1.0, -1.0], least=-1.0)

    def _forbid(self, choice: Indices) -> None:
        """What is recomputed must differ, or more be offloaded."""
        again = choice == RECOMPUTE
        found, ends = self._levels(np.where(again, choice, KEEP))
        need = max(float(found.max()), float(ends.max())) - self.task.allowance
        count = self.count
        self.rows.add(
            [*range(count), *range(count, 2 * count)],
            [*np.where(again, -need, need), *self.others[1]],
            least=need - need * int(again.sum()),
        )
