"""Planners by name. A planner takes a `Search` and returns cut positions, () if it finds none that fits."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from ..ir.errors import PlanError
from .equal import equal
from .exact import exact
from .search import Search

Planner = Callable[[Search], tuple[int, ...]]

PLANNERS: dict[str, Planner] = {
    "exact": exact,
    "equal": equal,
}


def names() -> tuple[str, ...]:
    """All planners that `make_plan` knows.

    >>> names()
    ('exact', 'equal')
    """
    return tuple(PLANNERS)


def planner(name: str) -> Planner:
    """A planner by name. Raises: PlanError if there is none."""
    if name not in PLANNERS:
        near = get_close_matches(name, PLANNERS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise PlanError(
            f"no planner is named {name!r}", hint=f"{meant}the planners are {', '.join(PLANNERS)}"
        )
    return PLANNERS[name]
