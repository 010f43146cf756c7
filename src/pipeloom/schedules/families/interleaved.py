"""Schedules for several chunks per rank in a loop: groups of micro-batches per chunk, in fixed patterns.

    looped_bfs        all micro-batches of a chunk, then the next chunk; bubble as GPipe's over v
    interleaved_1f1b  groups of p micro-batches; bubble 3 (p - 1) / v, peak p + (p - 1) / v
    gis, gis_g        W apart from I and a shorter warm-up: peak p, or (g (v - 1) + p) / v with groups of g
    gis_h             g = ceil(p / 2): peak p (v + 1) / 2v
    po                a new micro-batch every period: long-lived residuals stand out, for offloading
    po_h, po_f        the same with half, and all, of the stages of a rank offloaded (see `copies`)

Peaks in micro-batches, bubbles in F, for F = I = W. Published GIS runs W right after its I: bubble
2 (p - 1) / v, for gis_h [2 (p - 1) + (v - 1) p / 2] / v; option `join=1` makes that. By default W fills the
gaps instead, within the same peak: bubble (p - 1) / v for gis.

Sources: arXiv 2104.04473 (interleaved), 2211.05953 (looped BFS), 2503.01328 (GIS, GIS-H, PO).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import gcd, inf

from ...ir.action import Action, B, F, I, Kind, W
from ...ir.columns import Rows
from ..language.patterns import phases, turns
from ..language.recipe import Recipe, timings
from ..language.shape import Periodic, Shape, options, path_clock
from ..list_scheduler.choose import as_published


def looped_bfs(s: Shape) -> Recipe:
    options(s)
    return Recipe(rows=lambda rank: [*turns(s, rank, F), *turns(s, rank, B)])


def interleaved_1f1b(s: Shape) -> list[Recipe]:
    """Megatron's order: 2 (p - 1 - rank) + (v - 1) g forwards ahead, then one forward, one backward."""
    g = _whole_group(s, options(s, group=s.depth)["group"], 1)
    forward, backward = (lambda r: turns(s, r, F, g)), (lambda r: turns(s, r, B, g))
    ahead = lambda r: 2 * last(s, r) + (len(s.rank_stages[r]) - 1) * g  # noqa: E731
    published = Recipe(
        rows=phases(s, warm_up=ahead, repeat="FB", kinds="FB", forward=forward, backward=backward)
    )
    if s.even and s.microbatches % g == 0:
        return [published]
    most = s.depth + (s.depth - 1) / s.chunks
    return [published, Recipe(clock=path_clock(s, kinds="FB"), memory=most)]


def _whole_group(s: Shape, group: float, least: int, most: float = inf) -> int:
    to = f"to {most:g}" if most < inf else "on"
    good = least <= group <= most and group == int(group)
    s.require(good, f"group {group:g} for {s.depth} ranks", f"use a whole number from {least} {to}")
    return int(group)


def gis(s: Shape) -> list[Recipe]:
    return [*_gis(s, s.depth), *_as_published(s, gis)]


def gis_g(s: Shape) -> list[Recipe]:
    """Groups of `group` micro-batches: fewer hold less, down to half of p."""
    half = -(-s.depth // 2)
    g = _whole_group(s, s.option("group", half), half, s.depth)
    return [*_gis(s, g), *_as_published(s, gis_g)]


def gis_h(s: Shape) -> list[Recipe]:
    return [*_gis(s, -(-s.depth // 2)), *_as_published(s, gis_h)]


def _as_published(s: Shape, family: Callable[[Shape], list[Recipe]]) -> list[Recipe]:
    return [] if s.option("join", 0.0) else as_published(s, family)


def _gis(s: Shape, g: int) -> Iterator[Recipe]:
    join = options(s, group=g, join=0.0)["join"]
    memory = (g * (s.chunks - 1) + s.depth) / s.chunks
    # Groups that share the micro-batches evenly may end better than whole ones and a rest.
    alike = -(-s.microbatches // -(-s.microbatches // g))
    sizes = dict.fromkeys((alike, g) if 2 * alike >= s.depth else (g,))
    every = [Recipe(kinds="FIW", rows=_grouped(s, size), fill="", memory=memory) for size in sizes]
    if not join:
        for published in every:
            yield from timings(s, replace(published, fill="W"))
        if not s.even:
            clock = path_clock(s, (g / s.depth,), real=True)
            yield Recipe(kinds="FIW", clock=clock, memory=memory, overlap=1.0)
    yield from every


def _grouped(s: Shape, g: int) -> Rows:
    """The rows for whole groups, without the micro-batches that are too many: what is left can still run, and
    no later than before."""
    whole = replace(s, microbatches=-(-s.microbatches // g) * g)
    rows = phases(
        whole,
        warm_up=lambda r: g * (len(s.rank_stages[r]) - 1) + last(s, r),
        repeat="FIW",
        forward=lambda r: turns(whole, r, F, g),
        backward=lambda r: turns(whole, r, I, g),
    )
    return Rows(rows.columns.where(rows.columns.microbatch < s.microbatches))


def po(s: Shape) -> list[Recipe]:
    """Uniform repeating: GIS-H's building block with groups of one, then the same with other W and F."""
    p, v = s.depth, s.chunks
    limit = options(s, memory=p * (v + 1) / (2 * v) + (1 if p <= v else v - 1) / v)["memory"]
    plain = Recipe(kinds="FIW", clock=_uniform(s), memory=limit, early="none", fill="")
    free = [replace(plain, early=early, fill="W") for early in ("all", "warm", "none")]
    timed = [one for r in free for one in timings(s, r)]
    # Where messages are long a pace that leaves them time holds the same and waits less.
    paces = () if s.even else (((1.5,), (2.0, 1.0)), ((2.0,), (2.0,)))
    paced = [Recipe(kinds="FIW", clock=path_clock(s, *pace), memory=limit) for pace in paces]
    clock = _uniform(s)

    @cache
    def slotted(rank: int) -> list[Action]:
        """F, I and W in the very order of the clock: what is ready sooner waits for its turn."""
        own = [Action(c, k, b) for c in s.rank_stages[rank] for k in (F, I, W) for b in range(s.microbatches)]
        return sorted(own, key=lambda a: clock(a.stage, a.kind, a.microbatch))

    slots = replace(plain, clock=None, rows=slotted)
    exact = [] if s.even else [slots, replace(slots, fill="W")]
    return [*timed, plain, *paced, *exact, *as_published(s, po)]


def po_joined(s: Shape) -> Recipe:
    """The same with W next to its I, so that nothing is kept for it, and as much memory as that takes: for
    copies to the host, which are to free the rest."""
    options(s, memory=0.0)
    return Recipe(kinds="FIW", clock=_uniform(s), early="none", fill="")


def po_held(s: Shape, offload: int) -> float:
    """The most that a rank is to hold with so many stages offloaded, in residuals of one micro-batch on one
    stage: p (v - n) (v - n + 1) / 2v, and 3 in transit; 4 with all of them.

    Source: arXiv 2503.01328, for a peak of p (v + 1) / 2 where stage c keeps p (v - c) / v.
    """
    p, v, rest = s.depth, s.chunks, s.chunks - offload
    return float(p * rest * (rest + 1) // (2 * v) + 3 if rest else 4)


def _uniform(s: Shape) -> Periodic:
    """Slots of equal length: a chunk begins 3 ceil(p / 2) slots after the one before, F takes one slot from
    rank to rank and I two, W is next to its I. Where that would put chunks on top of each other, later
    ones move by 3."""
    p, v, half = s.depth, s.chunks, -(-s.depth // 2)
    # Forwards stand at every third slot of a period of 3 v: that of chunk c at 3 half c mod 3 v. Two would
    # meet where half (c - c') is a multiple of v, that is v / gcd(v, half) chunks apart: from there on all
    # move by 3.
    apart = v // gcd(v, half)

    def begin(chunk: int) -> int:
        return 3 * half * chunk + 3 * (chunk // apart)

    first: dict[tuple[int, Kind], float] = {}
    for stage, rank in enumerate(s.placement):
        chunk = s.chunk[stage]
        # Ranks side by side have one place: how far they are from the end. In a loop it is their number.
        place = rank if p == s.ranks else p - 1 - min(last(s, rank), p - 1)
        # From the last chunk's F on: a slot for it, one per rank on to the last rank, two per rank back.
        turn = begin(v - 1) + place + 3 * (p - 1 - place) + 1
        first[stage, F] = begin(chunk) + place
        first[stage, I] = turn + begin(v - 1 - chunk)
        first[stage, W] = first[stage, I] + 1
    return Periodic(first, 3 * v)


def last(s: Shape, rank: int) -> int:
    """Rank changes from the last chunk of a rank to the end: p - 1 - rank in a loop."""
    return s.ahead[s.rank_stages[rank][-1]]
