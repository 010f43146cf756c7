"""What priorities and limits alone can do, and where they fail: the table of greedy rules for p = 4, m = 8.

The figures (F = 1, B = 2, or F = I = W = 1; two chunks of half the size) were measured once elsewhere, and
are found again by `plain_order`. Of two rows a limit means something else there: the last free place of a
rank is always kept for its second chunk, also where that chunk has one already. The language limits the first
chunk instead, so that all places may be taken: a shorter step, or a place more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import pytest
from plain_order import plain_order

from pipeloom.ir.action import Action, B, F, I, W
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.stages import chain
from pipeloom.schedules import placements, registry
from pipeloom.schedules.language.recipe import Recipe, per_rank
from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.list_scheduler.choose_recipe import make

P, M = 4, 8


def shape(placement: tuple[int, ...], transfer_s: float = 0.0, seconds: float = 1.0) -> Shape:
    share = seconds * P / len(placement)
    costs = equal_costs(len(placement), forward_s=share, input_grad_s=share, weight_grad_s=share)
    return Shape(
        stages=chain(len(placement)),
        placement=placement,
        microbatches=M,
        costs=costs,
        transfer_s=lambda a, b: transfer_s,
    )


LINE, LOOP, VEE = (shape(p) for p in (placements.loop(P), placements.loop(P, 2), placements.wave(P)))
BEFORE = {I: 0, F: 1, W: 2}


def backward_first(a: Action) -> object:
    return a.kind == F, a.microbatch


def igw(a: Action) -> object:
    return BEFORE[a.kind], a.microbatch


def deepest(s: Shape) -> Callable[[Action], object]:
    """Of each kind first what is furthest on its way: forwards of the last chunk, backwards of the first."""
    return lambda a: (BEFORE.get(a.kind, 0), s.chunk[a.stage] * (-1 if a.kind == F else 1), a.microbatch)


def by_chunk(a: Action) -> object:
    chunk = LOOP.chunk[a.stage]
    return a.kind == B, chunk if a.kind == F else -chunk, a.microbatch


def by_round(a: Action) -> object:
    chunk = LOOP.chunk[a.stage]
    return a.kind == F, a.microbatch // P, chunk if a.kind == F else -chunk, a.microbatch


def greedy(priority: Callable[[Action], object], kinds: str = "FB", **limits: object) -> Recipe:
    return Recipe(kinds=kinds, fill="", priority=priority, **limits)  # type: ignore[arg-type]


TABLE = {
    "GPipe": (LINE, greedy(lambda a: (a.kind == B, a.microbatch)), 33, [8, 8, 8, 8]),
    "1F1B": (LINE, greedy(backward_first, memory=lambda d: P - d), 33, [4, 3, 2, 1]),
    "eager 1F1B": (LINE, greedy(backward_first), 33, [8, 7, 4, 1]),
    "like ZB-H1": (LINE, greedy(igw, "FIW", memory=lambda d: P - d), 30, [4, 3, 2, 1]),
    "the same memory everywhere": (LINE, greedy(igw, "FIW", memory=P), 29, [4, 4, 4, 4]),
    "caps of ZB-H2": (LINE, greedy(igw, "FIW", memory=lambda d: 2 * (P - d) - 1), 30, [7, 5, 3, 1]),
    "V, 1F1B": (VEE, greedy(deepest(VEE), memory=P), 32.5, [8, 8, 8, 8]),
    "V, split": (VEE, greedy(deepest(VEE), "FIW", memory=P), 25.5, [8, 8, 8, 8]),
    "V, half": (
        VEE,
        greedy(deepest(VEE), "FIW", memory=P / 2 + 1, in_flight_stage=lambda s: M if VEE.chunk[s] else P + 1),
        26.5,
        [6, 6, 6, 6],
    ),
    "looped BFS": (LOOP, greedy(by_chunk), 28.5, [16, 16, 16, 16]),
    "by rounds, not Megatron's order": (
        LOOP,
        greedy(by_round, memory=lambda d: (P + 2 * (P - d - 1) + 1) / 2),
        31.5,
        [11, 9, 7, 5],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    """Makespan, and peak in stages' worth of residuals."""
    s, recipe, step_s, peak = TABLE[name]
    made = make(s, recipe).outcome
    assert made.step_s == step_s
    assert [round(p * s.chunks, 6) for p in made.peak] == peak


def plain(name: str, *, keeps: bool = False) -> tuple[float, list[int]]:
    """What `plain_order` makes of a row of the table.

    keeps: the last free place of a rank is for its last chunk.
    """
    s, recipe, *_ = TABLE[name]
    assert isinstance(recipe.kinds, str) and recipe.priority is not None

    def may_open(a: Action, taken: Sequence[int]) -> bool:
        rank, stage = s.placement[a.stage], recipe.in_flight_stage
        held = sum(taken[own] for own in s.rank_stages[rank])
        most = inf if recipe.memory is None else per_rank(recipe.memory, rank) * s.chunks
        if keeps:
            return held < most - (s.chunk[a.stage] < s.chunks - 1)
        return held < most and (stage is None or taken[a.stage] < stage(a.stage))

    seconds = {kind: s.seconds(0, kind) for kind in (F, B, I, W)}
    return plain_order(s.placement, M, recipe.kinds, recipe.priority, may_open, seconds)


@pytest.mark.parametrize("name", TABLE)
def test_a_plain_scheduler_finds_the_same(name: str) -> None:
    *_, step_s, peak = TABLE[name]
    assert plain(name) == (step_s, peak)


@pytest.mark.parametrize(
    ("name", "step_s", "peak"),
    [
        ("V, 1F1B", 32.5, [8, 8, 8, 8]),
        ("V, split", 25.5, [8, 8, 8, 8]),
        ("V, half", 28.5, [6, 6, 6, 6]),
        ("by rounds, not Megatron's order", 31.5, [10, 8, 7, 5]),
    ],
)
def test_with_the_last_place_kept_for_the_last_chunk_it_finds_the_published_figures(
    name: str, step_s: float, peak: list[int]
) -> None:
    assert plain(name, keeps=True) == (step_s, peak)
    ours = make(*TABLE[name][:2]).outcome
    assert ours.step_s <= step_s


def test_the_order_of_gpipe_and_1f1b_is_the_librarys() -> None:
    for name, key in (("gpipe", "GPipe"), ("1f1b", "1F1B")):
        s, recipe, *_ = TABLE[key]
        assert make(s, recipe).outcome.rows == registry.build(name, s.stages, s.placement, M).rows


def test_trap_backward_first_alone_is_not_1f1b() -> None:
    """Without a limit the first ranks hold all micro-batches: limits are part of a schedule."""
    assert make(LINE, TABLE["eager 1F1B"][1]).outcome.peak[0] == M


@pytest.mark.parametrize(
    ("s", "memory"), [(VEE, P / 2 + 1), (shape(placements.wave(P), transfer_s=0.5, seconds=10.0), P)]
)
def test_trap_limits_and_greed_block_a_v(s: Shape, memory: float) -> None:
    """Rank 0 spends all its room on forwards of its first chunk; the error names what each rank wants."""
    with pytest.raises(DeadlockError) as caught:
        make(s, greedy(deepest(s), "FIW", memory=memory))
    message = caught.value.message
    assert "rank 0" in message and all(f"rank {r} " in message for r in range(1, P))
    assert "in_flight_stage" in str(caught.value.hint) and "clock=" in str(caught.value.hint)


def test_trap_interleaving_needs_a_pattern() -> None:
    """The pattern gives Megatron's order, 28.5; no priority by rounds does."""
    built = registry.build("interleaved_1f1b", LOOP.stages, LOOP.placement, M)
    recipe = Recipe(rows=built.rows)
    assert make(LOOP, recipe).outcome.step_s == 28.5
    assert make(LOOP, TABLE["by rounds, not Megatron's order"][1]).outcome.step_s == 31.5
