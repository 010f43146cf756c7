"""What happens to residuals between forward and backward, and which weights a backward sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Treatment = Literal["keep", "recompute", "offload"]
WeightPolicy = Literal["flush"]
"""`flush`: every micro-batch of a step uses the same weights, updated after the last backward."""


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """For each stage: residual name -> treatment. What is not named is kept.

    A residual is named as `StageFunctions.residual_bytes` names it: by the op of the graph that made it.
    """

    stages: tuple[Mapping[str, Treatment], ...] = field(default=())

    def treatment(self, stage: int, residual: str) -> Treatment:
        """
        >>> MemoryPolicy(stages=({"relu": "recompute"},)).treatment(0, "relu")
        'recompute'
        """
        return self.stages[stage].get(residual, "keep") if stage < len(self.stages) else "keep"

    def treated(self, stage: int, treatment: Treatment) -> frozenset[str]:
        """The residuals of a stage that are treated so, of those that are named.

        >>> sorted(MemoryPolicy(stages=({"relu": "recompute", "mm": "keep"},)).treated(0, "recompute"))
        ['relu']
        """
        named = self.stages[stage] if stage < len(self.stages) else {}
        return frozenset(name for name, given in named.items() if given == treatment)
