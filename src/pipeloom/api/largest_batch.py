"""Sizes of micro-batches: which there may be, and the largest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import isqrt
from typing import TYPE_CHECKING, TypeAlias

from ..ir.errors import CaptureError, ConfigError
from ..ir.plan import Plan
from ..planner import Sample, interpolated, largest_size

if TYPE_CHECKING:
    from ..tracer import Captured
    from .plan_request import Planning


@dataclass(frozen=True, kw_only=True)
class Taken(Sample):
    """A sample with what its stages can be traced from."""

    captured: Captured


def captured_of(sample: Sample) -> Captured | None:
    """None for one that was interpolated."""
    return sample.captured if isinstance(sample, Taken) else None


Take: TypeAlias = Callable[[int], Sample]
"""Micro-batch size -> the model captured and profiled at it."""

MOST = 1 << 16
"""Rows of the largest micro-batch that is looked at."""

SURE = 3
"""Sizes that are captured as they are, from the largest downwards, before one is advised."""

REACH = 64
"""Where the model cannot be captured at a size, so many smaller ones are tried in its place."""


def divisors(whole: int) -> list[int]:
    """All that divide a batch, ascending; of batches beyond 10**12 rows at least those up to a million.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, min(isqrt(whole), 10**6) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})


class Usable:
    """Some sizes (ascending), of which the model may not be had at all: batch normalisation wants two rows,
    `Job.batch` may want multiples of eight."""

    def __init__(self, sizes: Sequence[int], take: Take) -> None:
        self.sizes = sizes

        @cache
        def taken(size: int) -> Sample | None:
            try:
                return take(size)
            except CaptureError:
                return None

        self.at_size = taken

    def at(self, index: int) -> Sample | None:
        """The model at that size or, where it cannot be captured, at the next smaller one; None if there is
        none within reach."""
        near = range(index, max(index - REACH, -1), -1)
        return next(self.of(self.sizes[place] for place in near), None)

    def around(self, size: int) -> list[Sample]:
        """The model at two sizes to interpolate between, of several rows; at fewer if it cannot be captured
        at those that are tried."""
        tried = (size, size + 1, size - 1, size + 2, 2 * size, 3 * size, size // 2, size - size % 8)
        several = (number for number in dict.fromkeys(tried) if number > 1)
        return list(islice(self.of(several), 2))

    def of(self, sizes: Iterable[int]) -> Iterator[Sample]:
        """The model at those of some sizes at which it can be captured."""
        return (sample for sample in map(self.at_size, sizes) if sample is not None)


def largest_below(planning: Planning, known: Sample, take: Take) -> int | None:
    """The largest size below a known one that has a plan; 0 if none was found.

    By interpolation between `known` and a much smaller micro-batch; None if the model cannot be captured at
    any of those tried, or is of other ops there. One row is looked at as it is: models may do without some
    ops then.
    """
    quiet = replace(planning, watch=None)
    usable = Usable([size for size in planning.sizes() if size < known.size], take)

    several = [size for size in usable.sizes if size > 1]
    if several:
        tried = (*several[:SURE], 4, 8, known.size // 2)
        least = next(usable.of(size for size in dict.fromkeys(tried) if 1 < size < known.size), None)
        if least is None or least.graph.fingerprint != known.graph.fingerprint:
            return None  # there is nothing to interpolate
        bold = largest_size(several, lambda size: quiet.fits(interpolated(least, known, size)))
        near = [] if bold is None else [size for size in several if size <= bold][-REACH:]
        for sample in islice(usable.of(reversed(near)), SURE):  # interpolation may have been too bold
            if quiet.fits(sample):
                return sample.size
    one = usable.at_size(1) if 1 in usable.sizes else None
    return 1 if one is not None and quiet.fits(one) else 0


def largest_plan(planning: Planning, start: int, take: Take) -> tuple[Plan, Sample]:
    """The plan with the largest micro-batches that fit, and the model at that size.

    start: a size to look around.  take: captures and profiles.
    Sizes are judged by interpolation between two that were taken, unless the model has other ops at one of
    them; the one found is taken too, and so are smaller ones until one fits. Sizes at which the model cannot
    be captured are passed over.
    Raises: InfeasibleError if not even the smallest size fits; ConfigError if no size divides the global
        batch; CaptureError if the model cannot be captured at those that were tried.
    """
    sizes = planning.sizes()
    if not sizes:
        raise ConfigError(
            f"{planning.schedule} cannot divide a global batch of {planning.global_batch} rows among its "
            "directions",
            hint="use an even number of rows",
        )
    usable = Usable(sizes, take)
    at = min(range(len(sizes)), key=lambda index: abs(sizes[index] - start))
    known = usable.around(sizes[max(at, 1)]) if len(sizes) > 2 else []
    between = len(known) > 1 and known[0].graph.fingerprint == known[1].graph.fingerprint

    def fits(index: int) -> bool:
        sample = usable.at(index)
        return sample is not None and planning.fits(sample)

    def seems_to_fit(index: int) -> bool:
        return planning.fits(interpolated(known[0], known[1], sizes[index])) if between else fits(index)

    index = largest_size(range(len(sizes)), seems_to_fit, start=at) or 0
    while index > 0 and not fits(index):
        index -= 1
    # Interpolation may have been too careful: the next size is tried as it is.
    while index + 1 < len(sizes) and fits(index + 1):
        index += 1
    sample = usable.at(index) or next(iter(known), None) or take(sizes[at])
    found = planning.plan(sample.graph, sample.profiles, sample.size, captured=captured_of(sample))
    return found, sample
