"""Recipes with mistakes in their rows, and with times of nothing."""

from dataclasses import replace

import pytest

from pipeloom.ir.action import Action, F, I
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.operation import Operation
from pipeloom.ir.schedule import parse_rows
from pipeloom.ir.stages import chain
from pipeloom.schedules import registry
from pipeloom.schedules.language.patterns import phases
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import path_clock
from pipeloom.schedules.list_scheduler.choose import fastest, order
from pipeloom.schedules.registry import shape_of

LAST = "1F0 1B0 1F1 1B1"
NEW = Operation(letters="NEW", meaning="", after=F)


def ordered(*rows: str, kinds: str = "FB", **limits: float) -> str:
    recipe = Recipe(kinds=kinds, rows=parse_rows(rows), **limits)  # type: ignore[arg-type]
    return str(order(shape_of(2, microbatches=2), recipe))


@pytest.mark.parametrize(
    ("rows", "kinds", "words"),
    [
        (("0F0 0F0 0F1 0B0 0B1", LAST), "FB", "rank 0 has 0F0 a second time"),
        (("0F0 0F1 0B0 0B1", f"{LAST} 0F0"), "FB", "rank 1 has 0F0, but stage 0 is on another"),
        (("0F0 0F1 0F5 0B0 0B1", LAST), "FB", "rank 0 has 0F5, but there are 2 micro-batches"),
        (("0F1 0F0 0B0 0B1", LAST), "FB", "rank 0 has 0F1 in front of 0F0"),
        (("0F0 0F1 0B0 0I0 0W0 0I1 0W1", LAST), "FBIW", "rank 0 has 0I0, (.|\n)*B, or I and W"),
    ],
)
def test_entries_that_would_never_get_their_turn(rows: tuple[str, ...], kinds: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as caught:
        ordered(*rows, kinds=kinds)
    assert not isinstance(caught.value, DeadlockError)


def test_rows_that_block_by_themselves_are_not_blamed_on_limits() -> None:
    with pytest.raises(DeadlockError, match="rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1") as caught:
        ordered("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert caught.value.hint == "reorder the rows"


@pytest.mark.parametrize(
    ("family", "word"),
    [
        (lambda s: Recipe(), "no order"),
        (lambda s: Recipe(priority=str, rows=()), "priority and rows"),
        (lambda s: Recipe(priority=str, insert=(NEW,)), "NEW is not declared"),
        (lambda s: Recipe(clock=path_clock(s), early="never"), "never"),
        (lambda s: Recipe(rows=["0F0 0B0 0F1 0B1"] * 2), "a str"),
        (lambda s: Recipe(rows=lambda rank: None), "None"),  # type: ignore[arg-type, return-value]
        (lambda s: Recipe(priority=lambda a: (a.kind == F, a.microbatch), slices=3), "3 slices"),
        (lambda s: [], "a list"),
        (lambda s: Recipe(priority=lambda a: a.microbatch or "first"), "priority="),
        (lambda s: Recipe(priority=5), "priority=5"),  # type: ignore[arg-type]
        (lambda s: Recipe(clock=lambda stage, kind, b: None), "0B0"),  # type: ignore[arg-type, return-value]
        (lambda s: Recipe(priority=lambda a: 0, memory=lambda rank: None), "None"),  # type: ignore[arg-type, return-value]
        (lambda s: Recipe(priority=lambda a: 0, in_flight_stage="2"), "'2'"),  # type: ignore[arg-type]
    ],
)
def test_recipes_with_a_mistake_are_refused_with_a_sentence(family, word) -> None:
    with pytest.raises(ScheduleError, match=word):
        fastest(shape_of(2, microbatches=2), family)


def test_limits_may_be_one_number_for_all() -> None:
    one, each = (Recipe(priority=lambda a: a.microbatch, in_flight=limit) for limit in (1, lambda rank: 1))
    s = shape_of(2, microbatches=3)
    assert str(order(s, one)) == str(order(s, each))


def test_a_limit_that_binds_is_named() -> None:
    with pytest.raises(DeadlockError, match="limits block.*rank 0 has 0F1 at hand"):
        ordered("0F0 0F1 0B0 0B1", LAST, memory=1)


def test_what_before_holds_back_is_not_blamed_on_limits() -> None:
    recipe = Recipe(priority=lambda a: a.microbatch, before=lambda a, b: a.kind != F and b.kind == F)
    with pytest.raises(DeadlockError, match="rank 0 at 0F0 is held back by 0B0"):
        order(shape_of(2, microbatches=2), recipe)


@pytest.mark.parametrize(
    ("repeat", "kinds", "letter"),
    [("FB", "FIW", "B"), ("FX", "FIW", "X"), ("fi", "FIW", "f"), ("FW", "FB", "W")],
)
def test_a_pattern_of_letters_that_stand_for_nothing(repeat: str, kinds: str, letter: str) -> None:
    with pytest.raises(ScheduleError, match=f"the pattern '{repeat}' has '{letter}', but kinds='{kinds}'"):
        phases(shape_of(2, microbatches=2), warm_up=lambda rank: 1 - rank, repeat=repeat, kinds=kinds)


@pytest.mark.parametrize("kinds", ["F", "", "BF", "FBIW"])
def test_kinds_that_have_no_phases(kinds: str) -> None:
    with pytest.raises(ScheduleError, match=f"phases with kinds='{kinds}'"):
        phases(shape_of(2, microbatches=2), warm_up=lambda rank: 1 - rank, repeat="F", kinds=kinds)


@pytest.mark.parametrize("free", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_1p", "zb_2p"])
def test_forwards_that_take_no_time(name: str, free: tuple[int, ...]) -> None:
    """They divided by zero. Besides being there the order must keep its memory."""
    costs = [replace(c, forward_s=0.0) if s in free else c for s, c in enumerate(equal_costs(3))]
    made = registry.build(name, chain(3), (0, 1, 2), 8, costs=tuple(costs))
    assert [row.count(Action(s, I, 7)) for s, row in enumerate(made.rows)] == [1, 1, 1]
    assert max(registry.in_flight(made)) <= (3 if name in ("zb_h1", "zb_1p") else 6)
