"""How far schedules are from the best there is: tiny cases solved exactly, as a mixed-integer program.

The variables are the starts of all actions and, for every two actions of a rank whose order is open, which
goes first. F, I and W of one stage go through the micro-batches in order, which costs nothing as all are
alike. Memory is counted where it can only grow: at each F.

    python bench/schedule_bounds.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np
from machine import describe_machine
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from pipeloom import schedules
from pipeloom.ir.action import Action, F, I, W
from pipeloom.ir.costs import equal_costs
from pipeloom.schedules import Shape
from pipeloom.schedules.list_scheduler import fastest, lower_bound_s

RESULTS = Path(__file__).parent / "results"
EVEN, LONG_CONTEXT, HEAVY_W = (1.0, 1.0, 1.0), (1.0, 1.4, 0.6), (1.0, 0.6, 1.4)
CASES = [
    (name, p, m, times)
    for name, sizes in {
        "zb_1p": [(2, 3), (2, 4), (3, 3)],
        "zb_2p": [(2, 4), (3, 3)],
        "zb_v": [(2, 2), (2, 3)],
        "v_half": [(2, 3), (3, 2)],
        "v_min": [(2, 2), (2, 3), (3, 2)],
        "gis": [(2, 2), (2, 3)],
    }.items()
    for p, m in sizes
    for times in (EVEN, LONG_CONTEXT, HEAVY_W)
]


@dataclass
class Program:
    """Rows of low <= A x <= high, collected one at a time."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        for column, value in terms.items():
            self.rows.append(len(self.low))
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)


def solve(s: Shape, memory: float, step_s: float, seconds: float) -> tuple[float, float]:
    """The shortest step that was found and a bound below which there is none; equal if solved.

    step_s: a step that is known to be possible.
    """
    stages, batches = range(len(s.placement)), range(s.microbatches)
    actions = [Action(c, k, b) for c in stages for k in (F, I, W) for b in batches]
    start = {a: i for i, a in enumerate(actions)}
    horizon = step_s + 0.5
    program, end, count = Program(), len(actions), len(actions) + 1

    def after(
        first: Action, second: Action, delay: float = 0.0, switch: dict[int, float] | None = None
    ) -> None:
        took = s.seconds(first.stage, first.kind) + delay
        slack = horizon if switch and -1 in switch else 0.0
        terms = {column: value for column, value in (switch or {}).items() if column >= 0}
        program.add({start[second]: 1.0, start[first]: -1.0, **terms}, low=took - slack)

    for a in actions:
        program.add({end: 1.0, start[a]: -1.0}, low=s.seconds(a.stage, a.kind))
        if a.microbatch:
            after(Action(a.stage, a.kind, a.microbatch - 1), a)
        before = {
            F: [(r, F) for r in s.flow.reads_from[a.stage]],
            W: [(a.stage, I)],
            I: [(a.stage, F), *((r, I) for r in s.flow.gradients_from[a.stage])],
        }[a.kind]
        for stage, kind in before:
            after(Action(stage, kind, a.microbatch), a, s.delay_s(stage, a.stage))
    first: dict[tuple[Action, Action], int] = {}
    for a, b in combinations(actions, 2):
        if s.placement[a.stage] != s.placement[b.stage] or (a.stage, a.kind) == (b.stage, b.kind):
            continue
        first[a, b] = count
        after(b, a, switch={count: horizon})  # a waits for b unless a is first
        after(a, b, switch={count: -horizon, -1: 1.0})
        count += 1
    for rank, own in enumerate(s.rank_stages):
        for opening in (a for a in actions if a.kind == F and s.placement[a.stage] == rank):
            _limit(program, first, opening, own, s.microbatches, memory * len(own))
    cost = np.zeros(count)
    cost[end] = 1.0
    table = coo_array((program.values, (program.rows, program.columns)), shape=(len(program.low), count))
    high = np.concatenate([np.full(end + 1, horizon), np.ones(count - end - 1)])
    made = milp(
        cost,
        constraints=LinearConstraint(table.tocsr(), program.low, program.high),
        bounds=Bounds(0, high),
        integrality=np.arange(count) > end,
        options={"time_limit": seconds},
    )
    if made.mip_dual_bound is None:
        raise SystemExit(f"the solver gave up: {made.message}")
    return float(made.fun if made.fun is not None else np.inf), float(made.mip_dual_bound)


def _limit(
    program: Program,
    first: dict[tuple[Action, Action], int],
    opening: Action,
    own: tuple[int, ...],
    microbatches: int,
    most: float,
) -> None:
    """At an F: it and the F before it, less the W before it, are at most `most`."""
    terms: dict[int, float] = {}
    constant = 1.0

    def count(a: Action, sign: float) -> None:
        nonlocal constant
        if (a.stage, a.kind) == (opening.stage, opening.kind):
            constant += sign * (a.microbatch < opening.microbatch)
        elif (a, opening) in first:
            terms[first[a, opening]] = sign
        else:
            terms[first[opening, a]] = -sign
            constant += sign

    for stage in own:
        for b in range(microbatches):
            count(Action(stage, F, b), 1.0)
            count(Action(stage, W, b), -1.0)
    program.add(terms, high=most - constant + 1e-6)


def measure(
    name: str, p: int, m: int, times: tuple[float, float, float], seconds: float
) -> dict[str, object]:
    """One line of the result."""
    stages, placement = schedules.default_placement(name, p)
    f, i, w = times
    costs = equal_costs(len(placement), forward_s=f, input_grad_s=i, weight_grad_s=w)
    s = Shape(stages=stages, placement=placement, microbatches=m, costs=costs, transfer_s=lambda a, b: 0.0)
    family = schedules.entry(name).recipe
    assert family is not None
    ours = fastest(s, family).outcome
    found, bound = solve(s, max(ours.peak), ours.step_s, seconds)
    return {
        "schedule": name,
        "ranks": p,
        "microbatches": m,
        "times": times,
        "peak": max(ours.peak),
        "ours": round(ours.step_s, 6),
        "best_found": round(found, 6),
        "bound": round(bound, 6),
        "simple_bound": round(lower_bound_s(s), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case")
    args = parser.parse_args()
    lines = []
    for case in CASES:
        line = measure(*case, args.seconds)
        lines.append(line)
        print(*(f"{key} {value}" for key, value in line.items()), flush=True)
    text = json.dumps({"machine": describe_machine(), "seconds": args.seconds, "lines": lines}, indent=1)
    (RESULTS / "schedule_bounds.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
