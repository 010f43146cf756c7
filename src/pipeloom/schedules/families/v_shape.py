"""V schedules: two chunks per rank, placed there and back, so that every rank holds equally much.

All are one recipe: a clock in which a micro-batch travels at some pace, and a memory limit. The slower the
pace, the more is held and the fewer bubbles there are. Each works for any placement, DAG and times.

Sources: ZB-V in arXiv 2401.10241; V-Half, V-Min and 1F1B-V in arXiv 2405.15362. Peaks in micro-batches for p
ranks: ZB-V p, V-Half p // 2 + 1, V-Min (p + 4) // 3, 1F1B-V the next above 2p / 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

from ...ir.action import Action, F, I, W
from ..language.build import options, timings
from ..language.periodic import Periodic
from ..language.recipe import Recipe
from ..language.shape import Shape, path_clock
from .blocks import block_clock
from .published import as_published

Pace: TypeAlias = tuple[str, tuple[float, ...], tuple[float, ...], tuple[float, float, float]]
"""Which forwards may run early, and the forward, backward and turns of `path_clock`."""


def recipes(s: Shape, memory: float, paces: Sequence[Pace], **rules: str) -> list[Recipe]:
    """A recipe for each pace; with uneven times also one with slots as long as the actions. Unless the family
    has a rule for W: first of all a block made for these times, and W that keeps to its place in the order
    until the drain."""
    memory = options(s, memory=memory)["memory"]
    candidates: list[Recipe] = []
    tuned = not s.even and "fill" not in rules
    block = block_clock(s, memory) if tuned else None
    if block is not None:
        tuned_recipe = Recipe(kinds="FIW", clock=block, memory=memory, fill="", drain="W", patience=0.5)
        candidates += [
            tuned_recipe,
            replace(tuned_recipe, early="warm"),
            replace(tuned_recipe, fill="W", overlap=0.5),
        ]
    for early, forward, backward, turns in paces:
        for real in (False,) if s.even or block is not None else (False, True):
            clock = path_clock(s, forward, backward, turns=turns, real=real)
            recipe = Recipe(kinds="FIW", clock=clock, memory=memory, early=early, **rules)  # type: ignore[arg-type]
            candidates += timings(s, recipe)
            if tuned:
                placed = clock if real else _w_in_free_slots(s, clock)
                candidates += [
                    replace(recipe, clock=placed, fill="", drain="W", patience=p) for p in (0.5, 1.0)
                ]
                if not real:
                    candidates.append(replace(recipe, clock=placed, patience=1.0))
    return candidates


def _patient(s: Shape, clocks: Sequence[Recipe]) -> list[Recipe]:
    """For uneven times the two published paces, with actions that wait for more urgent ones."""
    if s.even:
        return []
    paces = (((1.0, 2.0), (2.0, 1.0), (2.0, 0.0, 2.0)), ((2.0, 1.0), (2.0, 1.0), (0.0, 3.0, 1.0)))
    made = (path_clock(s, forward, backward, turns=turns) for forward, backward, turns in paces)
    return [Recipe(kinds="FIW", clock=clock, memory=clocks[0].memory, patience=1.0) for clock in made]


def _w_in_free_slots(s: Shape, clock: Periodic) -> Periodic:
    """A clock of equal slots with each W in the first slot after its I that no F or I of its rank has."""
    period = round(clock.period)
    at: dict[int, float] = {}
    for own in s.rank_stages:
        taken = {round(clock(stage, kind, 0)) % period for stage in own for kind in (F, I)}
        for stage in sorted(own, key=lambda stage: clock(stage, I, 0)):
            free = (round(clock(stage, I, 0)) + 1 + i for i in range(period))
            at[stage] = next((slot for slot in free if slot % period not in taken), clock(stage, W, 0))
            taken.add(round(at[stage]) % period)
    return Periodic({**clock.first, **{(stage, W): slot for stage, slot in at.items()}}, clock.period)


def zb_v(s: Shape) -> list[Recipe]:
    """ZB-V: no bubble but the start, with the memory of 1F1B."""
    return zb_v_recipes(s, options(s, memory=s.depth)["memory"])


def zb_v_recipes(s: Shape, memory: float) -> list[Recipe]:
    """The pattern of ZB-V; with less memory than it takes, or on another placement, clocks."""
    pattern = Recipe(kinds="FIW", rows=lambda rank: _zb_v_row(s, rank), memory=memory)
    patterns = timings(s, pattern) if all(len(own) == 2 for own in s.rank_stages) else []
    if patterns and not s.even:
        patterns += [replace(pattern, overlap=overlap) for overlap in ((1.0, 0.0), (0.0, 0.75))]
        patterns += [replace(pattern, level=True, overlap=(share, 0.0)) for share in (0.0, 0.1)]
    if patterns and memory >= s.depth:
        return patterns
    clocks = recipes(
        s,
        memory,
        [
            ("warm", (4,), (4,), (0, 0, 2)),
            ("all", (1, 2), (1, 2), (0, 0, 0)),
            ("warm", (2,), (2,), (0, 0, 0)),
        ],
    )
    return [*patterns, *clocks]


def _zb_v_row(s: Shape, rank: int) -> Iterator[Action]:
    """2p - 1 forwards, the later ones in turn from both chunks; then F and I of the second chunk until
    the first I of the first chunk is near; then both chunks in turn. W fills the gaps."""
    first, second = s.rank_stages[rank]
    p, m = s.depth, s.microbatches
    if p < s.ranks:  # ranks side by side: how far the second chunk is from the end, in a V the rank's number
        rank = min(s.ahead[second], p - 1)
    down, up, back, out = (
        iter([Action(c, k, b) for b in range(m)])
        for c, k in ((first, F), (second, F), (second, I), (first, I))
    )
    order = [down] * (2 * (p - rank) - 1) + [up, down] * rank
    order += [up, back] * (p - 1 - rank) + [up, back, down, out] * 2 * m
    return (action for turn in order for action in islice(turn, 1))


def v_half(s: Shape) -> list[Recipe]:
    """V-Half: half the memory of 1F1B."""
    clocks = recipes(
        s,
        s.depth // 2 + 1,
        [
            ("warm", (1, 2), (2, 1), (2, 0, 2)),
            ("all", (1.5, 2), (1.5, 2), (0, 0, 0)),
            ("all", (2,), (2,), (0, 0, 0)),
            ("none", (2, 1), (2, 1), (0, 3, 1)),
        ],
    )
    return [*clocks, *_patient(s, clocks), *as_published(s, v_half)]


def v_min(s: Shape) -> list[Recipe]:
    """V-Min: a third of the memory of 1F1B, for the longest models."""
    rest = 2.0 if s.depth % 3 == 0 else 0.0
    clocks = recipes(
        s,
        (s.depth + 4) // 3,
        [
            ("none", (1,), (1,), (0, rest, 0)),
            ("all", (1,), (1,), (0, rest, 0)),
            ("all", (1, 2), (1, 2), (0, 0, 0)),
        ],
    )
    return [*clocks, *_patient(s, clocks), *as_published(s, v_min)]


def one_f_one_b_v(s: Shape) -> list[Recipe]:
    """1F1B-V: two thirds of the memory of 1F1B; W right after its I, so no gradient waits for its turn."""
    return recipes(
        s,
        -(-2 * s.depth // 3),
        [
            ("all", (1, 2), (2, 1), (0, 0, 0)),
            ("all", (1.5, 2), (1.5, 2), (0, 0, 0)),
            ("all", (2,), (2,), (0, 0, 0)),
            ("warm", (2,), (2,), (0, 0, 0)),
            ("none", (2,), (2,), (0, 0, 0)),
        ],
        fill="",
    )
