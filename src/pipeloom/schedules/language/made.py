"""Made: a recipe and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..list_scheduler import Outcome
from .recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a recipe gives for a shape: the rows, and when the list scheduler expects what."""

    recipe: Recipe
    outcome: Outcome = field(repr=False)

    @property
    def cost(self) -> tuple[float, float]:
        """Smaller is better: the step, then the longest span of a rank."""
        return round(self.outcome.step_s, 9), round(self.outcome.span_s, 9)
