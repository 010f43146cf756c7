"""The language: every construct, and the traps of greedy order."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings, strategies as st
from small import built

from pipeloom.checks.schedules import check
from pipeloom.ir.action import Action, B, F, I, W
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.operation import Operation
from pipeloom.ir.schedule import parse_rows
from pipeloom.ir.stages import chain
from pipeloom.schedules import registry
from pipeloom.schedules.language import placements
from pipeloom.schedules.language.patterns import phases
from pipeloom.schedules.language.recipe import Recipe, slips_refused
from pipeloom.schedules.language.shape import Shape, path_clock
from pipeloom.schedules.list_scheduler.choose import fastest, make, order
from pipeloom.schedules.registry import shape_of


# The traps.
def deepest_first(s: Shape) -> Callable[[Action], object]:
    return lambda a: (a.kind == F, -s.chunk[a.stage], a.microbatch)


def test_trap_limits_per_chunk_or_a_clock_do_not_block() -> None:
    s = registry.shape_of(placement=placements.wave(4), microbatches=8)
    make(s, Recipe(kinds="FIW", priority=deepest_first(s), in_flight_stage=lambda stage: 3))
    for memory in (2, 2.5, 3, 4):
        clock = path_clock(s)
        assert max(make(s, Recipe(kinds="FIW", clock=clock, memory=memory)).peak) <= memory


def test_a_filler_that_waits_makes_room_for_one_forward_and_not_for_two() -> None:
    cost = StageCost(forward_s=4.0, input_grad_s=4.0, weight_grad_s=0.5, backward_s=4.5)
    s = registry.shape_of(placement=(0, 1, 1, 0, 0, 1), microbatches=3, costs=(cost,) * 6)
    assert make(s, Recipe(kinds="FIW", clock=path_clock(s), memory=1)).peak == pytest.approx((1.0, 1.0))


def test_a_clock_that_passes_the_limits_is_told_what_to_do() -> None:
    """Its own order has 0F0 1F0 0F1 on rank 1, which leave no room for 5F0."""
    times = ((1, 0.5), (0.5, 1), (3, 1), (3, 0.5), (3, 1), (1, 1))
    costs = [StageCost(forward_s=f, backward_s=i + 1, input_grad_s=i, weight_grad_s=1) for f, i in times]
    s = registry.shape_of(placement=(1, 1, 2, 2, 0, 1), microbatches=2, costs=costs)
    with pytest.raises(DeadlockError) as caught:
        make(s, Recipe(clock=path_clock(s, real=True, kinds="FB"), memory=1))
    assert "period" in (caught.value.hint or "")
    assert make(s, Recipe(clock=path_clock(s, real=True, kinds="FB", period=40.0), memory=1)).peak[1] <= 1


def test_a_filler_waits_for_what_is_on_its_way() -> None:
    """Rank 1 could begin W0 (3 s) at 6 s, but I1 comes at 8 s, and rank 0 waits for its result."""
    costs = tuple(
        StageCost(forward_s=1, backward_s=i + w, input_grad_s=i, weight_grad_s=w)
        for i, w in ((1, 1), (1, 3), (2, 1))
    )
    s = registry.shape_of(3, microbatches=2, costs=costs)
    rows = phases(s, warm_up=lambda rank: 2 - rank, repeat="FI")
    waits = make(s, Recipe(kinds="FIW", rows=rows))
    hurries = make(s, Recipe(kinds="FIW", rows=rows, overlap=1.0))
    kinds = ["".join(a.kind for a in o.rows[1]) for o in (waits, hurries)]
    assert kinds == ["FFIIWW", "FFIWIW"]
    # Nobody waits for the last I of rank 0, so there W goes first.
    assert "".join(a.kind for a in waits.rows[0]) == "FFIWIW"


def test_before_predicates() -> None:
    """GPipe as one predicate: no backward before any forward of its rank."""
    s = registry.shape_of(3, microbatches=4)
    made = make(s, Recipe(priority=lambda a: a.microbatch, before=lambda a, b: (a.kind, b.kind) == (F, B)))
    assert made.rows == registry.build("gpipe", s.stages, s.placement, 4).rows


def test_rows_as_given_and_what_they_lack() -> None:
    s = registry.shape_of(1, microbatches=1)
    row = (Action(0, F, 0), Action(0, B, 0))
    assert make(s, Recipe(rows=[row])).rows == (row,)
    with pytest.raises(ScheduleError, match="the rows never run 0B0"):
        make(s, Recipe(rows=[row[:1]]))


def test_kinds_per_stage() -> None:
    """The first stage sends no gradient on, so it need not split its backward."""
    s = registry.shape_of(2, microbatches=2)
    recipe = Recipe(
        kinds=lambda stage: "FIW" if stage else "FB", priority=lambda a: (a.kind == F, a.microbatch)
    )
    assert {a.kind for a in make(s, recipe).rows[0]} == {F, B}
    with pytest.raises(ScheduleError, match="use F, FB, FIW or, with rows=, FBIW"):
        make(s, Recipe(kinds="FX", priority=str))


def test_slices_go_back_where_they_came_from() -> None:
    assert str(built("seq1f1b:slices=2", 2, 4)).splitlines()[1] == "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2"
    with pytest.raises(ScheduleError, match="another slice"):
        check(replace(built("1f1b", 2, 4), slices=2), chain(2))


@pytest.mark.parametrize("limit", [12, 24])
def test_bytes_limit_what_a_rank_holds(limit: int) -> None:
    """Residuals of 34h + 5as and 32h kept until W: the published sizes, arXiv 2401.10241."""
    cost = replace(equal_costs(1, residual_bytes=3)[0], carried_bytes=1)
    made = built("zb_2p", 4, 16, costs=(cost,) * 4, limit_bytes=limit)
    for row in made.rows:
        assert max(accumulate({F: 3, I: -2, W: -1}[a.kind] for a in row)) <= limit


RECIPES = [n for n in registry.names() if registry.entry(n).recipe and n != "seq1f1b"]


@pytest.mark.parametrize("name", RECIPES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_shape_gives_a_schedule_that_can_run(name: str, data: st.DataObject) -> None:
    """Any number of ranks and micro-batches, uneven stages: complete and free of deadlock."""
    ranks, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    count = len(registry.default_placement(name, ranks)[1])
    second = st.sampled_from([0.5, 1.0, 1.5, 3.0])
    times = data.draw(st.lists(st.tuples(second, second, second), min_size=count, max_size=count))
    costs = tuple(
        StageCost(forward_s=f, backward_s=i + w, input_grad_s=i, weight_grad_s=w) for f, i, w in times
    )
    built(name, ranks, m, costs=costs)


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
        (lambda s: Recipe(priority=str, before=lambda a: True), "before= .* too many"),  # type: ignore[arg-type, misc]
        (lambda s: Recipe(priority=str, memory=lambda: 1), "memory= .* too many"),  # type: ignore[arg-type, misc]
        (lambda s: Recipe(priority=str, kinds=None), "kinds=None"),  # type: ignore[arg-type]
        (lambda s: Recipe(rows=3), "rows=3"),  # type: ignore[arg-type]
        (lambda s: Recipe(priority=str, fill="w"), "fill='w'"),
        (lambda s: Recipe(priority=str, drain=None), "drain=None"),  # type: ignore[arg-type]
        (lambda s: Recipe(priority=str, overlap=(1.0,)), "overlap="),  # type: ignore[arg-type]
        (lambda s: Recipe(priority=str, patience=-1), "patience=-1"),
    ],
)
def test_recipes_with_a_mistake_are_refused_with_a_sentence(family, word) -> None:
    with pytest.raises(ScheduleError, match=word):
        fastest(shape_of(2, microbatches=2), slips_refused(family))


def test_limits_may_be_one_number_for_all() -> None:
    one, each = (Recipe(priority=lambda a: a.microbatch, in_flight=limit) for limit in (1, lambda rank: 1))
    s = shape_of(2, microbatches=3)
    assert str(order(s, one)) == str(order(s, each))


BLOCKED = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(rows=parse_rows(BLOCKED)), "rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1"),
        (Recipe(rows=parse_rows(("0F0 0F1 0B0 0B1", LAST)), memory=1), "limits block.*rank 0 has 0F1"),
        (
            Recipe(priority=lambda a: a.microbatch, before=lambda a, b: a.kind != F and b.kind == F),
            "rank 0 at 0F0 is held back by 0B0",
        ),
    ],
    ids=["rows", "a limit", "before"],
)
def test_what_blocks_an_order_is_told(recipe: Recipe, words: str) -> None:
    with pytest.raises(DeadlockError, match=words):
        order(shape_of(2, microbatches=2), recipe)


@pytest.mark.parametrize(
    ("repeat", "kinds", "words"),
    [
        ("FB", "FIW", "the pattern 'FB' has 'B', but kinds='FIW'"),
        ("FX", "FIW", "has 'X'"),
        ("fi", "FIW", "has 'f'"),
        ("FW", "FB", "has 'W', but kinds='FB'"),
        *(("F", kinds, f"phases with kinds='{kinds}'") for kinds in ("F", "", "BF", "FBIW")),
    ],
)
def test_patterns_of_letters_that_stand_for_nothing(repeat: str, kinds: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        phases(shape_of(2, microbatches=2), warm_up=lambda rank: 1 - rank, repeat=repeat, kinds=kinds)


@pytest.mark.parametrize("free", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_1p", "zb_2p"])
def test_forwards_that_take_no_time(name: str, free: tuple[int, ...]) -> None:
    """They divided by zero. Besides being there the order must keep its memory."""
    costs = [replace(c, forward_s=0.0) if s in free else c for s, c in enumerate(equal_costs(3))]
    made = registry.build(name, chain(3), (0, 1, 2), 8, costs=tuple(costs))
    assert [row.count(Action(s, I, 7)) for s, row in enumerate(made.rows)] == [1, 1, 1]
    assert max(registry.in_flight(made)) <= (3 if name in ("zb_h1", "zb_1p") else 6)
