"""The list scheduler's loop: compiled and interpreted it makes the same schedules."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from timed import shape

from pipeloom.schedules import registry
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.list_scheduler import engine, event_heap, inner_loop
from pipeloom.schedules.list_scheduler.recipe_problem import make_problem
from pipeloom.schedules.list_scheduler.tables import as_lists, columns_in, tables_of


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.4, 0.6)])
@pytest.mark.parametrize("name", ["zb_2p", "zb_v", "v_min", "gis", "po", "looped_bfs", "hanayo"])
def test_compiled_and_interpreted_make_the_same(name: str, times: tuple[float, float, float]) -> None:
    s = shape(name, 4, 12, times=times, transfer_s=0.1)
    family = registry.entry(name).recipe
    assert family is not None
    given = family(s)
    for recipe in [given] if isinstance(given, Recipe) else given:
        task, _ = make_problem(s, recipe)
        found = []
        for form in (inner_loop.order_all.compiled, inner_loop.order_all.interpreted):
            t, state = tables_of(task, inf)
            if form is inner_loop.order_all.interpreted:
                t, state = as_lists(t), as_lists(state)
            for index in range(len(task.streams)):
                inner_loop.look.interpreted(t, state, index)
            found.append(
                (form(t, state, task.ranks), columns_in(task, t, state), list(map(float, state.start)))
            )
        (one, rows, starts), (two, other_rows, other_starts) = found
        assert one == two and starts == other_starts
        assert rows.same(other_rows)


@pytest.mark.parametrize("within", [0.0, 20.0, 80.0])
def test_a_run_ends_once_it_is_certain_to_take_too_long(within: float) -> None:
    s = shape("v_half", 4, 12)
    task, _ = make_problem(s, registry.entry("v_half").recipe(s)[0])  # type: ignore[misc, index]
    full = engine.run(task)
    assert full is not None
    short = engine.run(task, within)
    assert (short is None) == (full.step_s > within)
    assert engine.run(task, full.step_s) == full


def test_the_heap_gives_ranks_by_time_and_then_by_number() -> None:
    rng = np.random.default_rng(0)
    s = shape("zb_h1", 4, 8)
    task, _ = make_problem(s, registry.entry("zb_h1").recipe(s)[0])  # type: ignore[misc, index]
    state = as_lists(tables_of(task, inf)[1])
    wanted = sorted(zip(rng.integers(0, 9, 60) / 2, rng.integers(0, 5, 60).tolist(), strict=True))
    for at in rng.permutation(60):
        event_heap.push.interpreted(state, *wanted[at])
    assert [(state.event[0], event_heap.pop.interpreted(state)) for _ in wanted] == wanted
