"""Schedules that fill the pipeline from both ends, and waves.

    chimera       two replicas in opposite directions; arXiv 2107.06925
    dualpipe      the same with W apart, F of one direction next to I of the other; DeepSeek-V3
    dualpipev     dualpipe cut in half: one V, half the ranks, no replica
    hanayo        waves: a V repeated, so that no replica is needed; arXiv 2308.15762

chimera and dualpipe are for `replicate(stages, 2)` placed `both_ways`; `microbatches` is per direction.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.action import F
from .language import Recipe, Shape, options, path_clock
from .vee import zb_v_recipes


def chimera(s: Shape) -> list[Recipe]:
    """Each direction as if alone; the two meet in the gaps. Peak: p micro-batches of one replica."""
    memory = options(s, memory=s.ranks / 2)["memory"]
    return list(_clocks(s, "FB", memory))


def dualpipe(s: Shape) -> list[Recipe]:
    """Peak: p + 1 micro-batches of one replica."""
    memory = options(s, memory=(s.ranks + 1) / 2)["memory"]
    return list(_clocks(s, "FIW", memory))


def dualpipev(s: Shape) -> list[Recipe]:
    """The pattern of ZB-V with room for one micro-batch more, as 2p + 1 chunks."""
    return zb_v_recipes(s, options(s, memory=s.ranks + 0.5)["memory"])


def hanayo(s: Shape) -> list[Recipe]:
    """Waves at full pace; peak p micro-batches."""
    memory = options(s, memory=s.ranks)["memory"]
    return list(_clocks(s, "FB", memory))


def _clocks(s: Shape, kinds: str, memory: float) -> Iterator[Recipe]:
    for real in (False,) if s.even else (False, True):
        for pace in (2.0, 1.5, 1.0):
            clock = path_clock(s, (pace,), (pace,), real=real, kinds=kinds)
            for early in ("all", "warm", "none"):
                yield Recipe(kinds=kinds, clock=clock, memory=memory, early=early)
    yield Recipe(kinds=kinds, priority=lambda a: (a.kind == F, a.microbatch, -a.stage), memory=memory)
