"""The same choice, exactly: an integer programme, by HiGHS (scipy.optimize.milp).

    least   sum over ops of t_p y_p + sum of b_r x_r + s e
    with    copies freed by x and o                  >= need
            y_p >= x_r                               for each op p of the chain of r
            x_r + o_r <= 1
            e >= sum of size_r o_r - hidden,  sum of size_r o_r <= most

x_r: r is recomputed; o_r: offloaded; y_p: op p runs again (takes 0 or 1 by itself); e: bytes not hidden.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from .intervals import Indices
from .memopt_greedy import Task
from .residuals import KEEP, OFFLOAD, RECOMPUTE, Residuals

LIMIT_S = 30.0
"""Time after which the best choice found so far is taken."""


def exact(residuals: Residuals, task: Task) -> Indices | None:
    """The choice that frees what is needed in least time; None if there is none."""
    count, size = len(residuals), residuals.size
    if task.need <= 0:
        return np.zeros(count, np.int64)
    ops = np.unique(residuals.chain.items)
    column = np.searchsorted(ops, residuals.chain.items) + 2 * count
    last = 2 * count + len(ops)  # of e
    owner = np.repeat(np.arange(count), np.diff(residuals.chain.first))
    away = task.per_offloaded > 0
    rows = _Rows(last + 1)
    rows.add([*range(count), *range(count, 2 * count)],
             [*(size * task.per_recomputed), *(size * task.per_offloaded)], least=task.need)  # fmt: skip
    for op, k in zip(column.tolist(), owner.tolist(), strict=True):
        rows.add([op, k], [1.0, -1.0], least=0.0)
    for k in range(count):
        rows.add([k, count + k], [1.0, 1.0], most=1.0)
    rows.add([last, *range(count, 2 * count)], [1.0, *-size], least=-task.hidden)
    rows.add([*range(count, 2 * count)], [*size], most=task.most)
    cost = np.concatenate([
        residuals.besides, np.zeros(count), residuals.seconds[ops], [task.s_per_byte],
    ])  # fmt: skip
    upper = np.concatenate([
        task.may * float(task.per_recomputed > 0), np.full(count, float(away)), np.ones(len(ops)), [np.inf],
    ])  # fmt: skip
    whole = np.concatenate([np.ones(2 * count), np.zeros(len(ops) + 1)])
    scale = cost.max() or 1.0
    solved = milp(
        cost / scale, integrality=whole, bounds=Bounds(0.0, upper), constraints=rows.constraint(),
        options={"time_limit": LIMIT_S, "mip_rel_gap": 1e-9},
    )  # fmt: skip
    if solved.x is None:
        return None
    chosen = np.round(solved.x[: 2 * count]).astype(bool)
    return np.where(chosen[:count], RECOMPUTE, np.where(chosen[count:], OFFLOAD, KEEP)).astype(np.int64)


class _Rows:
    """Rows of a constraint matrix."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.entries: list[tuple[int, int, float]] = []
        self.bounds: list[tuple[float, float]] = []

    def add(
        self, columns: list[int], weights: list[float], *, least: float = -np.inf, most: float = np.inf
    ) -> None:
        row, scale = len(self.bounds), max(map(abs, weights), default=1.0) or 1.0
        self.entries += [(row, int(c), float(w) / scale) for c, w in zip(columns, weights, strict=True)]
        self.bounds.append((least / scale, most / scale))

    def constraint(self) -> LinearConstraint:
        row, column, weight = map(np.array, zip(*self.entries, strict=True))
        matrix = coo_array((weight, (row, column)), shape=(len(self.bounds), self.columns)).tocsr()
        least, most = map(np.array, zip(*self.bounds, strict=True))
        return LinearConstraint(matrix, least, most)
