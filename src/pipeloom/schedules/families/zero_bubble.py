"""Zero-bubble schedules on one stage per rank: W fills what waiting leaves idle.

    zb_h1 = zb_1p   the memory of 1F1B, bubble (p - 1)(F + I - W)
    zb_h2 = zb_2p   twice that memory; each rank is busy without a gap from its first action to its last,
                    so no bubble where each rank may begin its next step when it is done (post-validation)

Option `memory`: most residuals in micro-batches. Source: arXiv 2401.10241 (which writes B for our I).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from ...ir.action import F, I
from ..language.patterns import phases
from ..language.recipe import Recipe, steady_paces
from ..language.shape import Shape, options, path_clock
from ..list_scheduler.tables import EPS


def zb_h1(s: Shape) -> list[Recipe]:
    return list(_family(s, options(s, memory=s.depth)["memory"]))


def zb_h2(s: Shape) -> list[Recipe]:
    return list(_family(s, options(s, memory=2 * s.depth)["memory"]))


def _family(s: Shape, memory: float) -> Iterator[Recipe]:
    last = [s.ahead[own[-1]] for own in s.rank_stages]
    if memory >= 2 * s.depth - 1:
        yield Recipe(
            kinds="FIW",
            priority=lambda a: (a.kind != I, a.microbatch),
            memory=memory,
            in_flight=lambda rank: 2 * last[rank] + 1,
        )
    rows = phases(s, warm_up=lambda rank: last[rank], repeat="FI")
    one = Recipe(kinds="FIW", rows=rows, memory=memory)
    yield one
    if s.chunks > 1:
        yield from steady_paces(s, "FIW", memory)
    if s.even and memory <= s.depth:
        return
    yield replace(one, overlap=1.0)
    for more in (1.25, 1.5, 2.0):
        ahead = phases(s, warm_up=lambda rank, more=more: int(more * last[rank]), repeat="FI")  # type: ignore[misc]
        yield replace(one, rows=ahead)
        yield replace(one, rows=ahead, overlap=1.0)
    clock = path_clock(s, (2.0,), (2.0,), real=True)
    for early in ("all", "warm"):
        yield Recipe(kinds="FIW", clock=clock, memory=memory, early=early, overlap=1.0)
    yield from _level(s, memory)


def _level(s: Shape, memory: float) -> Iterator[Recipe]:
    """Forwards until the first gradient is back, then F before I; W so that ranks are idle for equally long.

    The longest gap cannot be shorter than what the memory leaves of that round trip; the others stay below
    it. W that sticks out of its gap as long as there are forwards makes the step shorter and the span longer.
    """
    clock = path_clock(s, real=True).first

    def round_trip(rank: int) -> float:
        """How many forwards fit into it; any number of those that take no time."""
        stage = s.rank_stages[rank][-1]
        took = s.seconds(stage, F)
        return int((clock[stage, I] - clock[stage, F]) / took + EPS) if took else inf

    level = Recipe(
        kinds="FIW",
        priority=lambda a: (a.kind != F, a.microbatch),
        memory=memory,
        in_flight=round_trip,
        level=True,
    )
    yield level
    yield replace(level, overlap=(0.25, 0.0))
    yield replace(level, overlap=(0.75, 0.25), patience=0.5)
