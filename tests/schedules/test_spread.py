"""Stages that span several ranks: described, checked, simulated."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from commands import figures
from small import built, simulated

from pipeloom.checks.schedules import check
from pipeloom.ir.action import F, W
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import CutError, ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph, chain, replicate
from pipeloom.planner.placement import stages_for
from pipeloom.schedules import registry
from pipeloom.schedules.language.placements import spread
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import Shape, path_clock
from pipeloom.schedules.list_scheduler.choose import make
from pipeloom.schedules.registry import Entry

TABLE = (0, 1, (2, 3), 4)

ENTRY = """
from pipeloom.schedules.registry import Entry
from pipeloom.schedules.language.recipe import Recipe

def order(s):
    return Recipe(priority=lambda a: (a.kind == 'B', a.microbatch))

experts = Entry(recipe=order, place='table', table=lambda ranks: (0, (1, 2), 3))
"""

EXPERTS, PLACEMENT = spread(chain(4), TABLE)


def one_f_one_b(s: Shape) -> Schedule:
    recipe = Recipe(priority=lambda a: (a.kind == F, a.microbatch), in_flight=lambda r: (4, 3, 2, 2, 1)[r])
    rows = make(s, recipe).rows
    return Schedule(name="mine", microbatches=s.microbatches, placement=s.placement, rows=rows)


def begin_together(costs: tuple[StageCost, ...]) -> Schedule:
    """Both ranks of the stage begin each F and B at once."""
    made = one_f_one_b(registry.shape_of(stages=EXPERTS, placement=PLACEMENT, microbatches=4, costs=costs))
    starts = {e.action: e.start_s for e in simulated(made, costs, EXPERTS).events}
    assert all(starts[f"2{k}{b}"] == starts[f"4{k}{b}"] for k in "FB" for b in range(4))
    return made


def test_a_stage_on_two_ranks_is_two_stages_that_begin_together_however_late_one_of_them_is() -> None:
    made = begin_together(equal_costs(5))
    check(made, EXPERTS)
    second, third = str(made).splitlines()[2:4]
    assert [w[1:] for w in second.split()] == [w[1:] for w in third.split()]
    cost = equal_costs(1)[0]
    begin_together((cost, cost, replace(cost, forward_s=2.0, backward_s=4.0), cost, cost))


def test_shared_parameters_are_summed_and_others_are_not() -> None:
    one = dag(2, [(0, 1)], params={0: ("a",), 1: ("b",)})
    shared, placement = spread(one, (0, (1, 2)))
    assert dict(shared.tied) == {"b": (1, 2)} and placement == (0, 1, 2)
    assert spread(one, (0, (1, 2)), shared=False)[0].tied == {}
    graph, _ = spread(dag(2, [(0, 1)], value_bytes=40), ((0, 1, 2), 3))
    assert [v.bytes for v in graph.between[0, 1]] == [16]  # 10 rows in three parts, rounded up


def test_shards_know_where_they_come_from() -> None:
    assert EXPERTS.cuts == 4 and [EXPERTS.origin(s) for s in range(5)] == [0, 1, 2, 3, 2]
    with pytest.raises(CutError, match="a stage on several ranks cannot be replicated"):
        replicate(EXPERTS)
    with pytest.raises(ScheduleError, match="replicas or shards already"):
        spread(EXPERTS, (0, 1, 2, 3, 4))


def test_times_of_the_command_line_are_those_of_the_stages(tmp_path: Path) -> None:
    file = tmp_path / "experts_timed.py"
    file.write_text(ENTRY)
    words = ("-p", "4", "-m", "2", "-F", "1,2,1", "-T", "0.5,0.5")
    assert figures("schedule", "show", f"{file}:experts", *words)["rows"][2] == "3F0 3F1 3B0 3B1"


@pytest.mark.parametrize("table", [(0, 1), (0, (1, 1), 2), (0, (), 1), (0, (-1, 2), 1)])
def test_wrong_tables_are_refused(table: tuple[int | tuple[int, ...], ...]) -> None:
    with pytest.raises(ScheduleError, match="is placed on ranks|a placement of 2 stages"):
        spread(chain(3), table)


def test_a_schedule_may_bring_its_table_and_cannot_be_run(tmp_path: Path) -> None:
    file = tmp_path / "experts_in_test.py"
    file.write_text(ENTRY)
    name = f"{file}:experts"
    assert "3F0" in str(built(name, 4, 4)).splitlines()[2]
    with pytest.raises(ScheduleError, match="cannot be run: its stage 1 spans ranks 1 and 2"):
        stages_for(name, 4)
    with pytest.raises(ScheduleError, match="no table"):
        Entry(place="table")


def wide(m: int = 6, *, limit: float | tuple[float, ...]) -> tuple[StageGraph, Shape]:
    """A stage on all of 4 ranks in front of a chain, and a second one in the middle of the chain."""
    stages, placement = spread(chain(6), (tuple(range(4)), 0, 1, tuple(range(4)), 2, 3))
    light = StageCost(forward_s=1.0, backward_s=1.0, input_grad_s=0.5, weight_grad_s=0.5)
    heavy = StageCost(forward_s=1.0, backward_s=3.0, input_grad_s=1.5, weight_grad_s=1.5, residual_bytes=1)
    costs = tuple(light if stages.origin(s) in (0, 3) else heavy for s in range(len(placement)))
    made = registry.shape_of(
        stages=stages, placement=placement, microbatches=m, costs=costs, limit_bytes=limit
    )
    return stages, made


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(priority=lambda a: (a.kind == F, a.microbatch)),
        Recipe(priority=lambda a: (a.kind != F, a.microbatch)),
        Recipe(kinds="FIW", priority=lambda a: (a.kind == F, a.microbatch)),
        Recipe(priority=lambda a: a.microbatch, before=lambda a, b: False),
    ],
    ids=["backward first", "forward first", "split", "with a predicate"],
)
def test_greedy_orders_let_all_ranks_of_a_stage_begin_together(recipe: Recipe) -> None:
    limits = (4.0, 4.0, 3.0, 2.0)
    stages, made = wide(limit=limits)
    outcome = make(made, recipe)
    check(Schedule(name="", microbatches=6, placement=made.placement, rows=outcome.rows), stages)
    begun: dict[tuple[object, ...], set[float]] = defaultdict(set)
    for row, starts in zip(outcome.rows, outcome.starts, strict=True):
        for a, at in zip(row, starts, strict=True):
            if a.kind != W:
                begun[stages.origin(a.stage), a.kind, a.microbatch].add(float(at))
    assert all(len(times) == 1 for times in begun.values())
    assert all(held <= most for held, most in zip(outcome.peak, limits, strict=True))


def test_an_order_by_a_clock_holds_all_ranks_of_a_stage_together() -> None:
    stages, made = wide(limit=4.0)
    rows = make(made, Recipe(clock=path_clock(made, kinds="FB"))).rows
    check(Schedule(name="", microbatches=6, placement=made.placement, rows=rows), stages)
    with pytest.raises(ScheduleError, match="3 limits for 4 ranks"):
        make(wide(limit=(1.0, 2.0, 3.0))[1], Recipe(priority=lambda a: a.microbatch))
