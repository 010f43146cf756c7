"""What priorities and limits alone can do, and where they fail: the table of greedy rules for p = 4, m = 8.

Source of the figures: an independent list scheduler, run once over the same rules (F = 1, B = 2, or F = I =
W = 1; two chunks of half the size). Where it broke ties otherwise, our figure stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeloom import schedules
from pipeloom.ir.action import Action, B, F, I, W
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.stages import chain
from pipeloom.schedules import Recipe, Shape, make

P, M = 4, 8


def shape(placement: tuple[int, ...], transfer_s: float = 0.0, seconds: float = 1.0) -> Shape:
    share = seconds * P / len(placement)
    costs = equal_costs(len(placement), forward_s=share, input_grad_s=share, weight_grad_s=share)
    return Shape(
        stages=chain(len(placement)), placement=placement, microbatches=M, costs=costs,
        transfer_s=lambda a, b: transfer_s,
    )  # fmt: skip


LINE, LOOP, VEE = (shape(p) for p in (schedules.loop(P), schedules.loop(P, 2), schedules.wave(P)))
BEFORE = {I: 0, F: 1, W: 2}


def backward_first(a: Action) -> object:
    return a.kind == F, a.microbatch


def igw(a: Action) -> object:
    return BEFORE[a.kind], a.microbatch


def deepest(s: Shape) -> Callable[[Action], object]:
    return lambda a: (BEFORE.get(a.kind, 0), -s.chunk[a.stage], a.microbatch)


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
    "V, split; 25.5": (VEE, greedy(deepest(VEE), "FIW", memory=P), 26, [8, 8, 8, 8]),
    "V, half, a place kept for the second chunk; 28.5": (
        VEE,
        greedy(
            deepest(VEE), "FIW", memory=P / 2 + 1, in_flight_stage=lambda s: M if VEE.chunk[s] else P + 1
        ),
        27.5, [6, 6, 6, 6],
    ),
    "looped BFS": (LOOP, greedy(by_chunk), 28.5, [16, 16, 16, 16]),
    "by rounds, not Megatron's order; peak 10, 8": (
        LOOP, greedy(by_round, memory=lambda d: (P + 2 * (P - d - 1) + 1) / 2), 31.5, [11, 9, 7, 5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    """Makespan, and peak in stages' worth of residuals."""
    s, recipe, step_s, peak = TABLE[name]
    made = make(s, recipe).outcome
    assert made.step_s == step_s
    assert [round(p * s.chunks, 6) for p in made.peak] == peak


def test_the_order_of_gpipe_and_1f1b_is_the_librarys() -> None:
    for name, key in (("gpipe", "GPipe"), ("1f1b", "1F1B")):
        s, recipe, *_ = TABLE[key]
        assert make(s, recipe).outcome.rows == schedules.build(name, s.stages, s.placement, M).rows


def test_trap_backward_first_alone_is_not_1f1b() -> None:
    """Without a limit the first ranks hold all micro-batches: limits are part of a schedule."""
    assert make(LINE, TABLE["eager 1F1B"][1]).outcome.peak[0] == M


@pytest.mark.parametrize(
    ("s", "memory"), [(VEE, P / 2 + 1), (shape(schedules.wave(P), transfer_s=0.5, seconds=10.0), P)]
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
    built = schedules.build("interleaved_1f1b", LOOP.stages, LOOP.placement, M)
    recipe = Recipe(rows=built.rows)
    assert make(LOOP, recipe).outcome.step_s == 28.5
    assert make(LOOP, TABLE["by rounds, not Megatron's order; peak 10, 8"][1]).outcome.step_s == 31.5
