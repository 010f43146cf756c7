"""Idle reasons for planned steps, replicas of the stages included; what the rows of stages say."""

from dataclasses import replace

import graphpipe
import pytest
from every_schedule import gpt_job, plan_of
from refusals import refused
from runs import capture_of, even_plan
from small import alike, simulated

from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import PlanError
from pipeloom.ir.plan import widened
from pipeloom.reports import explain_steps, stage_rows


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_predicted_step_is_explained_from_its_plan(name: str) -> None:
    job = gpt_job()
    plan, graph = plan_of(job, name, 2, microbatches=4), capture_of(job, 1).graph
    stages = plan.replicated(plan.stage_graph(graph))
    costs = equal_costs(len(plan.placement))
    timeline = simulated(plan.as_schedule, costs, stages, alike(2, 1e9))
    (found,) = explain_steps(plan, graph, [None, timeline])
    busy_s = sum(timeline.totals.busy_s)
    assert found.idle_s + busy_s == pytest.approx(2 * timeline.step_s)
    assert found.bubble == pytest.approx(timeline.bubble)
    assert found.path[0].start_s == 0.0 and found.path[-1].end_s == timeline.step_s
    assert "'other'" in refused(PlanError, explain_steps, replace(plan, graph="other"), graph, [])


@pytest.mark.slow
def test_rows_of_stages_name_the_layers_within_towers_and_count_replicas() -> None:
    job = graphpipe.small_mmt(towers=2, layers=8)
    plan, graph = even_plan(job, 3, microbatches=4), capture_of(job).graph
    rows = stage_rows(graph, plan)
    assert rows[0].contents.startswith("towers.0.layers.0 … towers.0.layers.")
    assert rows[-1].contents.startswith("towers.1.layers.") and rows[-1].contents.endswith(", head")
    assert [row.replicas for row in rows] == [1, 1, 1]
    wide = stage_rows(graph, widened(plan, 2))
    assert [(row.rank, row.replicas) for row in wide] == [(0, 2), (2, 2), (4, 2)]
