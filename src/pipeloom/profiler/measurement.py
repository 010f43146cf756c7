"""What measuring a machine gives: figures with their spread. No torch: planning reads them, too."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One figure: the median of several measurements, the lowest and the highest of them, and the unit.

    of: what was measured again and again: "runs", or "ops" of different shapes.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    of: str


def summarise_runs(name: str, values: Iterable[float], unit: str) -> Measurement:
    """The median of several measurements of one figure, with the lowest and the highest of them.

    >>> summarise_runs("launch", [3.0, 1.0, 2.0], "s")
    Measurement(name='launch', value=2.0, low=1.0, high=3.0, unit='s', of='3 runs')
    """
    runs = sorted(values)
    return Measurement(
        name=name, value=median(runs), low=runs[0], high=runs[-1], unit=unit, of=f"{len(runs)} runs"
    )


def connected_components(pairs: Sequence[tuple[int, int]], count: int) -> list[int]:
    """The component that each of `count` devices belongs to when those pairs belong together.

    >>> connected_components([(0, 1), (2, 3)], 5)
    [0, 0, 2, 2, 4]
    """
    first = list(range(count))
    for a, b in pairs:
        low, high = sorted((first[a], first[b]))
        first = [low if component == high else component for component in first]
    return first


QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where Linux says how much of a period, both in microseconds, a container may compute."""


def usable_cores() -> int:
    """CPU cores that this process may run on; in a container no more than its quota is worth."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # no cgroups, or "max": no quota
        return cores
    return max(1, min(cores, quota_us // period_us))
