"""The list scheduler: compiled and interpreted alike, few receives posted."""

import pytest
from hypothesis import given, strategies as st
from small import alike, simulated
from timed import shape

from pipeloom.ir.schedule import Schedule
from pipeloom.schedules import registry
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import Shape, path_clock
from pipeloom.schedules.list_scheduler import engine, loop
from pipeloom.schedules.list_scheduler.choose import best, fastest, make, simulated_cost
from pipeloom.schedules.list_scheduler.tables import as_lists, tables_of
from pipeloom.simulator.summary import summarise


def recipes_of(name: str, s: Shape) -> list[Recipe]:
    made = registry.entry(name).recipe(s)
    return [made] if isinstance(made, Recipe) else list(made)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.4, 0.6)])
@pytest.mark.parametrize("name", ["zb_2p", "zb_v", "v_min", "gis", "po", "looped_bfs", "hanayo"])
def test_compiled_and_interpreted_make_the_same(name: str, times: tuple[float, float, float]) -> None:
    s = shape(name, 4, 12, times=times, transfer_s=0.1)
    for recipe in recipes_of(name, s):
        found = []
        for form in (loop.order_all.compiled, loop.order_all.interpreted):
            problem = tables_of(s, recipe)
            t, state = problem.tables, problem.new_state()
            if form is loop.order_all.interpreted:
                t, state = as_lists(t), as_lists(state)
            for index in range(len(problem.streams.kinds)):
                loop.look.interpreted(t, state, index)
            found.append((form(t, state, s.ranks), problem.columns(state), list(map(float, state.start))))
        (one, rows, starts), (two, other_rows, other_starts) = found
        assert one == two and starts == other_starts and rows.same(other_rows)


@pytest.mark.parametrize("within", [0.0, 20.0, 80.0])
def test_a_run_ends_once_it_is_certain_to_take_too_long(within: float) -> None:
    s = shape("v_half", 4, 12)
    problem = tables_of(s, recipes_of("v_half", s)[0])
    full = engine.run(problem)
    assert full is not None and engine.run(problem, full.step_s) == full
    assert (engine.run(problem, within) is None) == (full.step_s > within)


@given(
    name=st.sampled_from(["zb_2p", "zb_v", "v_min", "v_half", "gis", "po", "gis_h", "looped_bfs"]),
    ranks=st.integers(2, 4),
    rounds=st.integers(1, 2),
    times=st.tuples(*[st.floats(0.2, 2.0)] * 3),
    transfer_s=st.floats(0.01, 3.0),
)
def test_orders_are_compared_by_what_the_simulator_says(name, ranks, rounds, times, transfer_s) -> None:
    s = shape(name, ranks, rounds * ranks, times=times, transfer_s=transfer_s)
    scheduled = make(s, recipes_of(name, s)[0])
    cost, rows = simulated_cost(s, scheduled), scheduled.rows
    made = Schedule(name="", microbatches=rounds * ranks, placement=s.placement, rows=rows)
    timeline = simulated(made, s.costs, s.stages, alike(ranks, latency_s=transfer_s))
    assert cost is not None and cost[0] == pytest.approx(timeline.step_s, rel=1e-8)
    assert cost[1] == pytest.approx(summarise(timeline).span_s, rel=1e-8)


def test_a_family_may_try_fewer_recipes_for_many_micro_batches_than_for_few() -> None:
    """gis_g did with groups of 5 on 6 ranks, and a recipe was taken from a place behind the list's end."""

    def family(s: Shape) -> list[Recipe]:
        slow, good = (Recipe(kinds="FIW", clock=path_clock(s), memory=most) for most in (1, s.depth))
        return [slow] * 4 + [good] if s.microbatches <= 6 else [slow, slow, good]

    s = shape("zb_h1", 2, 9)
    assert fastest(s, family).step_s == best(s, family(s)).step_s
