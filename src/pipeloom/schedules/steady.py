"""Schedules without a flush: one of the library, built for many steps, of which the one it repeats is cut."""

from __future__ import annotations

from ..checks.schedules import check
from ..checks.weight_versions import weight_versions
from ..ir.stages import StageGraph
from ..ir.steady import SteadyStep, steady_step
from ..ir.weights import Updates
from .registry import Times, build


def build_steady(
    name: str,
    stages: StageGraph,
    placement: tuple[int, ...],
    updates: Updates,
    *,
    split_backward: bool = False,
    times: Times | None = None,
) -> SteadyStep:
    """The steady step of a schedule, for weights that are updated every `updates.every` micro-batches.

    The schedule is built for as many steps as fill the pipeline, and a few more.
    Raises: ScheduleError if it does not repeat, or if a micro-batch would need a version of the weights that
        is not made yet, or no longer kept; and as `build` does.

    >>> from pipeloom.ir.stages import chain
    >>> print(build_steady("1f1b", chain(2), (0, 1), Updates(policy="2bw", every=2)))
    0F2 0B1 0F3 0B2
    1F2 1B2 1F3 1B3
    """
    every = updates.every
    filling = -(-2 * len(placement) // every)
    steps = 2 * filling + 4
    long = build(name, stages, placement, steps * every, split_backward=split_backward, times=times)
    body = steady_step(long, every)
    check(body.unrolled, stages)
    weight_versions(body.unrolled, stages, updates)
    return body
