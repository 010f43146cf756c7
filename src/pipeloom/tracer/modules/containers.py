"""Lists, dictionaries and other containers that a unit is called with.

The unit gets copies. What it changes in them counts as part of its result, and each stage puts it into its
own: `h = block(h, losses)` may append to `losses` on one rank, and another one may read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf


def changed(leaves: Sequence[Any], spec: TreeSpec, now: Any) -> bool:
    """Whether containers that were built of these leaves hold something else now."""
    leaves_now, spec_now = tree_flatten(now)
    return spec != spec_now or any(a is not b for a, b in zip(leaves, leaves_now, strict=True))


def refill(given: Any, now: Any) -> Any:
    """Put into a container, and into those that it holds, what copies of them hold now.

    Returns: the container; or `now`, if that is something else.

    >>> losses = [1]
    >>> given = {"h": 0, "losses": losses}
    >>> refill(given, {"losses": [1, 2]}) is given, given, losses
    (True, {'losses': [1, 2]}, [1, 2])
    """
    if given is now or type(given) is not type(now) or tree_is_leaf(now):
        return now
    if isinstance(given, dict):
        parts = {key: refill(given.get(key), part) for key, part in now.items()}
        if list(given) != list(now):
            given.clear()
        for key, part in parts.items():
            given[key] = part
    elif isinstance(given, Sequence):
        old = [*given, *[None] * len(now)]
        items = [refill(*pair) for pair in zip(old, now, strict=False)]
        if isinstance(given, tuple):
            return tuple.__new__(type(given), items)
        given.clear()  # type: ignore[attr-defined]
        given.extend(items)  # type: ignore[attr-defined]
    else:
        names = [field.name for field in fields(given)] if is_dataclass(given) else vars(now)
        for name in names:
            object.__setattr__(given, name, refill(getattr(given, name, None), getattr(now, name)))
    return given


def handed_over(pair: tuple[Any, Any], given: Any) -> Any:
    """What a unit returned, of a pair of that and its arguments now. given: its arguments, to refill."""
    result, now = pair
    refill(given, now)
    return result
