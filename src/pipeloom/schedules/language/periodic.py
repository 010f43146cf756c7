"""Clocks that are the same for each micro-batch: as functions, and as numbers that arrays are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.action import B, Kind


@dataclass(frozen=True)
class Periodic:
    """A clock for recipes in which each micro-batch runs `period` after the one before.

    first: (stage, kind) -> when micro-batch 0 runs; kinds that are not in there run with B.

    >>> Periodic({(0, Kind("F")): 1.0, (0, B): 4.0}, period=3.0)(0, B, 2)
    10.0
    """

    first: Mapping[tuple[int, Kind], float]
    period: float

    def __call__(self, stage: int, kind: Kind, microbatch: int) -> float:
        own = self.first.get((stage, kind))
        return (self.first[stage, B] if own is None else own) + self.period * microbatch
