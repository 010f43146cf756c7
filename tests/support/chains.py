"""Synthetic chains for testing planners against each other, without graphs.

Nodes with random times, parameters and activations; a stage holds its parameters in one or several versions,
one gradient, and one copy of the activations per micro-batch in flight. What does not fit is freed at a
fractional greedy's cost: transfers hide inside a share of the stage's time, the rest is freed at the cheaper
of recomputation and exposed transfers. Times then only grow with the interval, so parametric search is exact.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf

from pipeloom.planner.search.problem import Partition, Problem, all_bands, best_cuts_within
from pipeloom.planner.treatments.choose import Evaluation


@dataclass(frozen=True, kw_only=True)
class Chain:
    """times: forward and backward seconds of each node.  recompute_s: forward seconds.  cap: of each stage.
    crossing_s: of a cut in front of each node and behind the last, hidden behind compute; none by default.
    """

    times: tuple[float, ...]
    recompute_s: tuple[float, ...]
    parameters: tuple[float, ...]
    activations: tuple[float, ...]
    stages: int
    stashes: bool
    overlap: float
    cap: float
    crossing_s: tuple[float, ...] = ()

    def problem(self) -> Problem:
        n = len(self.times)
        seconds = [0.0, *accumulate(self.times)]
        weights = [0.0, *accumulate(self.parameters)]
        held = [0.0, *accumulate(self.activations)]
        crossing = self.crossing_s or (0.0,) * (n + 1)

        def bytes_of(start: int, end: int, stage: int) -> float:
            in_flight = self.stages - stage
            versions = in_flight if self.stashes else 1
            own = (weights[end] - weights[start]) * (versions + 1)
            return own + (held[end] - held[start]) * in_flight

        def evaluate(start: int, end: int, stage: int) -> Evaluation:
            time = seconds[end] - seconds[start]
            peak = bytes_of(start, end, stage)
            excess = peak - self.cap
            exposed = self._exposed(start, end, stage, excess, time) if excess > 1e-12 else 0.0
            if exposed == inf:
                in_flight = self.stages - stage
                return Evaluation(seconds=inf, peak_bytes=peak - (held[end] - held[start]) * in_flight)
            turn = max(time + exposed, crossing[start], crossing[end])
            return Evaluation(seconds=turn, peak_bytes=min(peak, self.cap))

        return Problem(
            points=range(n + 1),
            stages=self.stages,
            caps=(self.cap,) * self.stages,
            evaluate=cache(evaluate),
            compute_s=lambda start, end, stage: seconds[end] - seconds[start],
            shares=lambda start, end: [bytes_of(start, end, s) / self.cap for s in range(self.stages)],
            crossing=lambda position: crossing[position],
        )

    def _exposed(self, start: int, end: int, stage: int, excess: float, time: float) -> float:
        """Seconds to free `excess` bytes; inf if there are not so many.

        Bandwidth is 1 byte per second, and what is moved goes out and comes back: per micro-batch two seconds
        per byte of one copy, which frees `in_flight` copies.
        """
        in_flight = self.stages - stage
        free = sorted(
            (min(self.recompute_s[k] / (self.activations[k] * in_flight), 2.0 / in_flight), k)
            for k in range(start, end)
        )
        hidden = self.overlap * time / 2 * in_flight
        left, cost = excess - hidden, 0.0
        if excess > sum(self.activations[start:end]) * in_flight + 1e-12:
            return inf
        for price, k in free:
            if left <= 0:
                break
            part = min(left, self.activations[k] * in_flight)
            cost += price * part
            left -= part
        return cost


def draw(rng: random.Random, *, nodes: int, stages: int, mixed: bool, overlap: float = 0.3) -> Chain:
    """A chain with no cap. mixed: activations that have nothing to do with times."""
    forward = [rng.uniform(0.2, 2.0) for _ in range(nodes)]
    ratio = rng.uniform(0.5, 2.0)
    activations = [
        rng.choice((0.05, 0.3, 1.0, 3.0)) * rng.uniform(0.5, 1.5) if mixed else ratio * t for t in forward
    ]
    return Chain(
        times=tuple(3 * t for t in forward),
        recompute_s=tuple(forward),
        parameters=tuple(rng.uniform(0.0, 0.6) for _ in range(nodes)),
        activations=tuple(activations),
        stages=stages,
        stashes=rng.random() < 0.5,
        overlap=overlap,
        cap=inf,
    )


def oracle(chain: Chain) -> Partition:
    """The best partition by trying them all (dynamic programming)."""
    problem = chain.problem()
    return best_cuts_within(problem, all_bands(problem))


def tight(rng: random.Random, chain: Chain) -> Chain:
    """The same with a cap of 1.0 to 1.3 times the smallest with which a plan exists."""
    low, high = 0.0, 1e4
    for _ in range(40):
        cap = (low + high) / 2
        low, high = (low, cap) if _fits(replace(chain, cap=cap)) else (cap, high)
    return replace(chain, cap=high * rng.uniform(1.0, 1.3))


def _fits(chain: Chain) -> bool:
    """Whether filling stage after stage leads to the end: exact, as bytes only grow with an interval."""
    problem = chain.problem()
    start = 0
    for stage in range(chain.stages):
        most = problem.last - (chain.stages - 1 - stage)
        ends = range(start + 1, most + 1)
        end = start + bisect_left(ends, True, key=lambda e: not problem.at(start, e, stage).fits)
        if end == start:
            return False
        start = end
    return start == problem.last
