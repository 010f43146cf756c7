"""Rows timed with few receives posted: what the simulator, which knows all of a program, says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from timed import shape

from pipeloom.schedules import registry
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.list_scheduler.choose_recipe import make
from pipeloom.schedules.list_scheduler.posted_receives import step_with_posted_receives
from pipeloom.schedules.list_scheduler.recipe_problem import make_problem
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, simulate_file

Times = tuple[float, float, float]


def of_simulator(rows: list[str], ranks: int, microbatches: int, times: Times, transfer_s: float) -> float:
    forward, back, weight = times
    scenario = Scenario(
        ranks=ranks,
        microbatches=microbatches,
        times=MicrobatchTimes(forward_s=forward, input_grad_s=back, weight_grad_s=weight),
        transfer_s=transfer_s,
    )
    Path("rows.txt").write_text("\n".join(rows))
    return simulate_file(Path("rows.txt"), scenario).summary.step_s


@given(
    name=st.sampled_from(["zb_2p", "zb_v", "v_min", "v_half", "gis", "po", "gis_h", "looped_bfs"]),
    ranks=st.integers(2, 4),
    rounds=st.integers(1, 2),
    times=st.tuples(*[st.floats(0.2, 2.0)] * 3),
    transfer_s=st.floats(0.01, 3.0),
)
def test_they_take_what_the_simulator_says(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    ranks: int,
    rounds: int,
    times: Times,
    transfer_s: float,
) -> None:
    microbatches = rounds * ranks
    s = shape(name, ranks, microbatches, times=times, transfer_s=transfer_s)
    family = registry.entry(name).recipe
    assert family is not None
    recipes = family(s)
    recipe = recipes if isinstance(recipes, Recipe) else recipes[0]
    task, _ = make_problem(s, recipe)
    outcome = make(s, recipe).outcome
    timed = step_with_posted_receives(task, outcome)
    assert timed is not None
    chunks = len(s.placement) // ranks
    rows = [" ".join(map(str, row)) for row in outcome.rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("rows"))
        whole = tuple(chunks * seconds for seconds in times)  # times of a rank are shared by its stages
        simulated = of_simulator(rows, ranks, microbatches, whole, transfer_s)
    assert timed[0] == pytest.approx(simulated, rel=1e-9)
    assert timed[0] >= outcome.step_s * (1 - 1e-12) and timed[1] <= timed[0]


def test_where_messages_take_no_time_there_is_nothing_to_look_at() -> None:
    s = shape("looped_bfs", 3, 6)
    family = registry.entry("looped_bfs").recipe
    assert family is not None
    recipe = family(s)
    assert isinstance(recipe, Recipe)
    task, _ = make_problem(s, recipe)
    assert step_with_posted_receives(task, make(s, recipe).outcome) is None
