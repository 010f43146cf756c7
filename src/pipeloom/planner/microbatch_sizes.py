"""Other micro-batch sizes, from what was captured and profiled at two, and the largest of them that fits.

Shapes are affine in the size, dimension by dimension, and so are bytes; times nearly are where kernels are
large. What is found by interpolation is therefore captured and profiled again before it is believed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir.errors import PlanError
from ..ir.graph import OpGraph, Value
from ..ir.profile import OpCost, Profile, batch_text


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """A model at one micro-batch size: its graph, and profiles by device name."""

    size: int
    graph: OpGraph
    profiles: Mapping[str, Profile]


def interpolate_sample(first: ProfiledModel, second: ProfiledModel, size: int) -> ProfiledModel:
    """What the model is like at another size.

    Raises: PlanError if the two are of different models or of one size.
    """
    if first.graph.fingerprint != second.graph.fingerprint or first.size == second.size:
        raise PlanError(
            f"samples of models {first.graph.fingerprint} and {second.graph.fingerprint} at sizes "
            f"{first.size} and {second.size}",
            hint="capture one model at two sizes",
        )
    part = (size - first.size) / (second.size - first.size)

    def value(a: Value, b: Value) -> Value:
        shape = tuple(_whole(x, y, part) for x, y in zip(a.shape, b.shape, strict=True))
        return replace(a, shape=shape)

    ops = tuple(
        replace(a, outputs=tuple(map(value, a.outputs, b.outputs)))
        for a, b in zip(first.graph.ops, second.graph.ops, strict=True)
    )
    inputs = tuple(map(value, first.graph.inputs, second.graph.inputs))
    graph = replace(first.graph, ops=ops, inputs=inputs)
    profiles = {
        name: replace(
            own,
            batch=batch_text(inputs),
            costs={op: _cost(cost, second.profiles[name].costs[op], part) for op, cost in own.costs.items()},
        )
        for name, own in first.profiles.items()
    }
    return ProfiledModel(size=size, graph=graph, profiles=profiles)


def shared_rows(graph: OpGraph) -> int | None:
    """The first dimension that all of the batch's tensors have; None where they differ."""
    sizes = {value.shape[:1] for value in graph.inputs}
    return next(iter(sizes))[0] if len(sizes) == 1 and () not in sizes else None


def _whole(x: int, y: int, part: float) -> int:
    return x if x == y else max(0, round(x + (y - x) * part))


def _cost(a: OpCost, b: OpCost, part: float) -> OpCost:
    """Numbers between, and beyond, those of two sizes; none is negative."""
    changed: dict[str, float | int] = {}
    for name, x in vars(a).items():
        y = getattr(b, name)
        if isinstance(x, int) and isinstance(y, int):
            changed[name] = _whole(x, y, part)
        elif isinstance(x, float | int) and x != y:
            changed[name] = max(0.0, x + (y - x) * part)
    return replace(a, **changed)  # type: ignore[arg-type]


def largest_size(sizes: Sequence[int], fits: Callable[[int], bool], *, start: int = 0) -> int | None:
    """The largest of some sizes (ascending) that fits, None if not even the first does.

    Fitting sizes are all smaller than those that do not fit. Sizes are tried from index `start` on in
    doubling steps, upwards if that fits and downwards if not, since sizes near it are the likeliest.

    >>> largest_size(range(1, 100), lambda size: size <= 37)
    37
    """
    low, high = -1, len(sizes)
    at = min(max(start, 0), len(sizes) - 1)
    step, upwards = 1, None
    while low < at < high:
        good = fits(sizes[at])
        low, high = (at, high) if good else (low, at)
        upwards = good if upwards is None else upwards
        if good != upwards:
            break
        at = min(at + step, len(sizes) - 1) if good else max(at - step, 0)
        step *= 2
    low += bisect_left(range(low + 1, high), True, key=lambda middle: not fits(sizes[middle]))
    return sizes[low] if low >= 0 else None
