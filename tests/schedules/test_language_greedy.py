"""What priorities and limits alone can do, and where they fail: the table of greedy rules for p = 4, m = 8.

F = 1, B = 2, or F = I = W = 1; two chunks of half the size.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeloom.ir.action import Action, B, F, I, W
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.stages import chain
from pipeloom.schedules.language import placements
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.list_scheduler.choose import make

P, M = 4, 8


def line_up(placement: tuple[int, ...], transfer_s: float = 0.0, seconds: float = 1.0) -> Shape:
    share = seconds * P / len(placement)
    costs = equal_costs(len(placement), forward_s=share, input_grad_s=share, weight_grad_s=share)
    stages, wait = chain(len(placement)), lambda a, b: transfer_s
    return Shape(stages=stages, placement=placement, microbatches=M, costs=costs, transfer_s=wait)


LINE, LOOP, VEE = (line_up(p) for p in (placements.loop(P), placements.loop(P, 2), placements.wave(P)))


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
    "backward first without a limit is not 1F1B": (LINE, greedy(backward_first), 33, [8, 7, 4, 1]),
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
    "by rounds, not Megatron's order, which takes 28.5": (
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
    made = make(s, recipe)
    assert made.step_s == step_s and [round(p * s.chunks, 6) for p in made.peak] == peak


@pytest.mark.parametrize(
    ("s", "memory"), [(VEE, P / 2 + 1), (line_up(placements.wave(P), transfer_s=0.5, seconds=10.0), P)]
)
def test_trap_limits_and_greed_block_a_v(s: Shape, memory: float) -> None:
    """Rank 0 spends all its room on forwards of its first chunk; the error names what each rank wants."""
    with pytest.raises(DeadlockError) as caught:
        make(s, greedy(deepest(s), "FIW", memory=memory))
    message = caught.value.message
    assert "rank 0" in message and all(f"rank {r} " in message for r in range(1, P))
    assert "in_flight_stage" in str(caught.value.hint) and "clock=" in str(caught.value.hint)
