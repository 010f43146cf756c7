"""Every optimizer of `torch.optim` trains as in one process, or is refused with a sentence."""

from pathlib import Path

import optimizers
import pytest
from optimizers import BY_ROLE, CLIP, MICROBATCHES, REFUSED, TRAINS, job_of
from runs import assert_same, capture_of, each_rank, even, even_plan, graph_of, pipelined, plan_for

import pipeloom
from pipeloom import Pipeline, planning
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.action import STEP
from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import step_bytes
from pipeloom.planner.plan_costs import PlanCosts

PAGE = Path(__file__).parents[2] / "docs" / "trust.md"


@pytest.mark.sampled(*(f"{name}-3" for name in (*TRAINS, BY_ROLE)))
@pytest.mark.parametrize("stages", [3, 2])
@pytest.mark.parametrize("name", (*TRAINS, BY_ROLE))
def test_equal_to_one_process(name: str, stages: int) -> None:
    job = job_of(name)
    plan = even_plan(job, stages, microbatches=2 * MICROBATCHES)
    found = pipelined(job, plan, optimizers.batches(), clip_norm=CLIP)
    assert_same(found, optimizers.plain_numbers(name), tolerance=optimizers.tolerance(name))


@pytest.mark.sampled(BY_ROLE)
@pytest.mark.parametrize("name", (*TRAINS, BY_ROLE))
def test_saved_and_resumed_at_another_depth_and_width(name: str, tmp_path: Path) -> None:
    table = dict(optimizers.resumed(name, tmp_path))
    assert max(table.values()) <= optimizers.tolerance(name), table


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[name]) as caught:
        pipeloom.plan(job_of(name), ranks=2, microbatch_size=2, microbatches=2)
    assert caught.value.hint
    assert ("scale [8]" in caught.value.message) == (name == "Muon")
    with pytest.raises(PlanError, match=REFUSED[name]):
        pipelined(job_of(name), even_plan(job_of(name), 2, microbatches=2), optimizers.batches())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TRAINS)
def test_state_is_planned_as_it_is_held(name: str) -> None:
    job = job_of(name)
    plan = pipeloom.plan(job, ranks=2, microbatch_size=2, microbatches=2, cluster="2 x a100-40")
    graph, cluster = graph_of(job), find_cluster("2 x a100-40")
    step = planning.simulate(plan, graph, planning.estimate(graph, cluster), cluster)

    def held(pipeline: Pipeline) -> tuple[int, int]:
        expected, planned = (each.peaks[pipeline.rank] for each in (pipeline.expected, step))
        assert expected.get("optimizer", 0) == planned.get("optimizer", 0)
        pipeline.step(job.batch(0, 4))
        return pipeline.weights.sizes["optimizer"], pipeline.ledger.at_peak.get("optimizer", 0)

    for stage, peak, (size, ledger) in zip(plan.stages, step.peaks, each_rank(job, plan, held), strict=True):
        assert stage.memory.optimizer == peak.get("optimizer", 0) == size
        assert ledger in (0, size)


def test_the_page_lists_every_optimizer() -> None:
    block = PAGE.read_text().partition("## Optimizers")[2].partition("```text\n")[2].partition("\n```")[0]
    rows = block.splitlines()[1:]
    assert rows == optimizers.table(), "write these rows:\n" + "\n".join(optimizers.table())


@pytest.mark.parametrize("together", [True, False])
def test_the_optimizer_steps_all_stages_of_a_rank_at_once(together: bool) -> None:
    """What updates all parameters at once needs scratch for those of all stages of the rank."""
    job = job_of("AdamW", foreach=together)
    graph, cluster = graph_of(job), cpu_cluster(1)
    plan = plan_for(capture_of(job), even(graph, 2), microbatches=2, schedule="gpipe", placement=(0, 0))
    costs = PlanCosts(graph, planning.estimate(graph, cluster), cluster).stages(plan)
    expected = step_bytes(p.update for p in graph.parameters)
    assert {cost.transient_bytes[STEP] for cost in costs} == {expected}
    assert expected == (1 * sum(p.bytes for p in graph.parameters) if together else 3 * 8 * 8 * 8)
    assert each_rank(job, plan, lambda pipeline: pipeline.weights.step_bytes) == [expected]
