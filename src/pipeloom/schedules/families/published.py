"""Orders as papers have them: made for equal times, kept whatever the times are.

With some times they are shorter than what is ordered by these times: a greedy order takes the next action as
soon as it can, and pays for it later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..language.recipe import Recipe
from ..language.shape import Shape
from ..list_scheduler.choose_recipe import fastest


def as_published(s: Shape, family: Callable[[Shape], Sequence[Recipe]]) -> list[Recipe]:
    """The order that a family gives for equal times, with W in its place and with W where it fits; nothing
    where the times are equal. It holds as much: what a rank holds follows from the order of its row."""
    if s.even:
        return []
    one = [
        replace(cost, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, backward_s=2.0) for cost in s.costs
    ]
    made = fastest(replace(s, costs=tuple(one), transfer_s=lambda source, target: 0.0), family)
    fixed = replace(
        made.recipe,
        rows=made.outcome.rows,
        clock=None,
        priority=None,
        fill="",
        drain="",
        early="all",
        patience=0.0,
        overlap=0.0,
    )
    return [fixed, replace(fixed, fill="W"), replace(fixed, fill="W", overlap=1.0)]
