"""Schedules that fill the pipeline from both ends, and waves.

    chimera       two replicas in opposite directions; arXiv 2107.06925
    dualpipe      the same with F of one direction and B of the other as a pair; DeepSeek-V3, arXiv 2412.19437
    dualpipev     dualpipe cut in half: one V, half the ranks, no replica
    hanayo        waves: a V repeated, so that no replica is needed; arXiv 2308.15762

chimera and dualpipe are for `replicate(stages, 2)` placed `both_ways`; `microbatches` is per direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from ...ir.action import Action, B, F, I, Kind, W
from ..language.placements import both_ways, wave
from ..language.recipe import Recipe, steady_paces
from ..language.shape import Shape, options
from .v_shape import zb_v_recipes


def chimera(s: Shape) -> list[Recipe]:
    """Each direction as if alone; the two meet in the gaps. Peak: p micro-batches of one replica."""
    return list(_clocks(s, "FB", options(s, memory=s.depth / 2)["memory"]))


def dualpipe(s: Shape) -> list[Recipe]:
    """Peak: p + 1 micro-batches of one replica. With the option pairs=0, and where the published order does
    not fit, no pairs, and W apart everywhere."""
    given = options(s, memory=(s.depth + 1) / 2, pairs=1)
    memory, last = given["memory"], s.ranks - 1
    apart = list(_clocks(s, "FIW", memory))
    if not given["pairs"]:
        return apart
    own = [stages if r <= last - r else stages[::-1] for r, stages in enumerate(map(sorted, s.rank_stages))]
    fits = s.ranks % 2 == 0 and s.placement == both_ways(s.ranks) and s.depth == s.ranks
    return _eight_phases(s, memory, own if fits else (), lambda rank: min(rank, last - rank)) or apart


def dualpipev(s: Shape) -> list[Recipe]:
    """Peak: 2p + 1 chunks. With the option pairs=0, and where the published order does not fit, the pattern
    of ZB-V with room for one chunk more."""
    given = options(s, memory=s.depth + 0.5, pairs=1)
    memory = given["memory"]
    apart = zb_v_recipes(replace(s, options={}), memory)
    if not given["pairs"]:
        return apart
    own = s.rank_stages if s.placement == wave(s.ranks) and s.depth == s.ranks else ()
    return _eight_phases(s, memory, own, lambda rank: rank) or apart


def hanayo(s: Shape) -> list[Recipe]:
    """Waves at full pace; peak p micro-batches."""
    return list(_clocks(s, "FB", options(s, memory=s.depth)["memory"]))


def _clocks(s: Shape, kinds: str, memory: float) -> Iterator[Recipe]:
    yield from steady_paces(s, kinds, memory, ("all", "warm", "none"))
    yield Recipe(kinds=kinds, priority=lambda a: (a.kind == F, a.microbatch, -a.stage), memory=memory)


def _eight_phases(
    s: Shape, memory: float, own: Sequence[Sequence[int]], depth: Callable[[int], int]
) -> list[Recipe]:
    """The published order; nothing where the placement, the limits or too few micro-batches forbid it.

    own: of each rank the stage whose micro-batches reach it first, and the other one; empty if there are no
    two such.  depth: rank -> how many ranks away its nearest micro-batches come in.
    """
    half = 1 + max(map(depth, range(s.ranks)))
    if not own or s.microbatches < 2 * half or memory < half + 0.5:
        return []
    rows = [list(_phases_of(stages, half, depth(r), s.microbatches)) for r, stages in enumerate(own)]
    for row, limit in zip(rows, s.limits_bytes, strict=True):
        if max(accumulate(s.costs[a.stage].held_change(a.kind) for a in row)) > limit:
            return []
    # Nobody is behind the innermost rank: there the first pair would only delay what its B gives.
    apart = [Action(stages[1], B, 0) for stages in own]

    def together(a: Action, b: Action) -> bool:
        return (a.kind, b.kind) == (F, B) and a.stage != b.stage and b not in apart

    published = Recipe(kinds="FBIW", rows=rows, memory=memory, fill="", together=together)
    return [published] if s.even else [published, replace(published, fill="W")]


def _phases_of(own: Sequence[int], half: int, depth: int, microbatches: int) -> Iterator[Action]:
    """What a rank runs, in the order of DualPipe; pairs are the neighbours F, B of different stages.

    half: ranks that a micro-batch passes before it meets those that came from the other end.
    """
    # So many whole turns that each of the two stages runs m = `microbatches` forwards in all:
    #
    #     F0   2 left + (depth + 1) + whole           = m
    #     F1   (depth + 1) + left + whole + left      = m
    #
    left = half - 1 - depth
    whole = microbatches - 2 * half + depth + 1
    late = (depth + 1) // 2  # of the last backwards the later ones leave their W for the gaps
    ends = ["B1 B0"] * late + (["I1 I0"] if depth % 2 else ["B1 I0"]) + ["I1 I0"] * (depth - late)
    phases = [
        *["F0"] * 2 * left,
        *["F0 F1"] * (depth + 1),
        *["I1 W F1"] * left,
        *["F0 B1 F1 B0"] * whole,
        *["B1 F1 B0"] * left,
        *ends,
        *["W I0"] * left,
        *["W"] * (depth + 1),
    ]
    count = {kind + chunk: iter(range(microbatches)) for kind in "FB" for chunk in "01"}
    weights: list[Action] = []
    for word in " ".join(phases).split():
        if word == "W":
            yield weights.pop(0)
            continue
        kind, chunk = Kind(word[0]), word[1]
        action = Action(own[int(chunk)], kind, next(count[("F" if kind == F else "B") + chunk]))
        if kind == I:
            weights.append(Action(action.stage, W, action.microbatch))
        yield action
