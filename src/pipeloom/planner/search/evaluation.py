"""What planners see of the cost model: an interval of ops as a stage -> its seconds, treatments, peak.

A planner asks an `Evaluator` and nothing else, so that all planners weigh stages alike, with memory
optimisation and without.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, TypeAlias

import numpy as np

from ...ir.memory_policy import Treatment
from ..stage_cost.model import CostModel


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Of one interval of ops as a stage.

    seconds: time that one micro-batch occupies the stage, exposed recomputation and transfers included; inf
        if it does not fit.
    treatments: residual -> what becomes of it; those not named are kept.
    peak_bytes: with these treatments; of what does not fit, the least that was reached.
    """

    seconds: float
    treatments: Mapping[str, Treatment] = field(default_factory=dict)
    peak_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        return self.seconds < inf


class Evaluator(Protocol):
    """Ops [start, end) as a stage -> their evaluation. Memoised: asking again costs nothing."""

    def __call__(self, start: int, end: int, stage: int, /) -> Evaluation: ...


Known: TypeAlias = dict[Hashable, dict[tuple[int, int], Evaluation]]
"""All that a stage's evaluation depends on besides its ops -> (start, end) -> it."""


class Memoised:
    """An evaluator that remembers; `asked` counts the intervals that were really worked out.

    watch: told that count whenever it grows.  known: what is remembered, shared with others.
    group: stage -> its key there.
    """

    def __init__(
        self,
        evaluate: Evaluator,
        watch: Callable[[int], None] | None = None,
        known: Known | None = None,
        group: Callable[[int], Hashable] = lambda stage: stage,
    ) -> None:
        self.evaluate = evaluate
        self.watch = watch
        self.known: Known = {} if known is None else known
        self.group = group
        self._of_stage: dict[int, dict[tuple[int, int], Evaluation]] = {}

    def __call__(self, start: int, end: int, stage: int, /) -> Evaluation:
        known = self._of_stage.get(stage)
        if known is None:
            known = self._of_stage[stage] = self.known.setdefault(self.group(stage), {})
        key = (start, end)
        if key not in known:
            known[key] = self.evaluate(start, end, stage)
            if self.watch is not None:
                self.watch(self.asked)
        return known[key]

    @property
    def asked(self) -> int:
        return sum(map(len, self.known.values()))


@dataclass(frozen=True)
class KeepEverything:
    """Evaluations by the cost model alone: every residual is kept.

    caps, in_flight: bytes, and micro-batches whose residuals are held at the peak, of each stage.
    """

    model: CostModel
    caps: Sequence[int]
    in_flight: Sequence[int]

    def __call__(self, start: int, end: int, stage: int, /) -> Evaluation:
        footprint, seconds = self.model.row(start, np.array([end]))
        peak = float(self.model.peaks(footprint, np.array([self.in_flight[stage]]))[0, 0])
        if peak > self.caps[stage]:
            return Evaluation(seconds=inf, peak_bytes=peak)
        turn = float(self.model.turns(footprint, seconds, np.array([stage]))[0, 0])
        return Evaluation(seconds=turn, peak_bytes=peak)
