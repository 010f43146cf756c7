"""Every optimizer of `torch.optim` trains as in one process, or is refused with a sentence."""

import json
from dataclasses import replace
from pathlib import Path

import optimizers
import pytest
from optimizers import CLIP, MICROBATCHES, REFUSED, TRAINS, job_of
from runs import assert_same, even_plan, graph_of, pipelined, threads

import pipeloom
from pipeloom import Options, Pipeline
from pipeloom.api import passes
from pipeloom.clusters import find_cluster
from pipeloom.ir.errors import PlanError
from pipeloom.ir.replicas import widened
from pipeloom.runtime.launch import launch

PAGE = Path(__file__).parents[2] / "docs" / "trust.md"


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", TRAINS)
def test_equal_to_one_process(name: str, stages: int) -> None:
    job = job_of(name)
    plan = even_plan(job, stages, microbatches=2 * MICROBATCHES)
    found = pipelined(job, plan, optimizers.batches(), clip_norm=CLIP)
    assert_same(found, optimizers.plain_numbers(name), tolerance=optimizers.tolerance(name))


@pytest.mark.parametrize("name", TRAINS)
def test_replicas_that_share_out_the_state(name: str) -> None:
    job = job_of(name)
    plan = widened(even_plan(job, 2, microbatches=MICROBATCHES), 2)
    found = pipelined(job, replace(plan, shard_optimizer=True), optimizers.batches(), clip_norm=CLIP)
    assert_same(found, optimizers.plain_numbers(name), tolerance=optimizers.tolerance(name))


def test_saved_and_resumed_at_another_depth_and_width(tmp_path: Path) -> None:
    assert launch(optimizers.resumed, optimizers.RANKS, args=(tmp_path,)) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert len(table) == 3 * len(TRAINS)
    far = {case: by for case, by in table.items() if by > optimizers.tolerance(case)}
    assert not far


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[name]) as caught:
        pipeloom.plan(job_of(name), stages=2, microbatch_size=2, microbatches=2)
    assert caught.value.hint
    assert ("scale [8]" in caught.value.message) == (name == "Muon")
    with pytest.raises(PlanError, match=REFUSED[name]):
        pipelined(job_of(name), even_plan(job_of(name), 2, microbatches=2), optimizers.batches())


@pytest.mark.parametrize("name", TRAINS)
def test_state_is_planned_as_it_is_held(name: str) -> None:
    job = job_of(name)
    plan = pipeloom.plan(job, stages=2, microbatch_size=2, microbatches=2, cluster="2 x a100-40")
    graph, cluster = graph_of(job), find_cluster("2 x a100-40")
    step = passes.simulate(plan, graph, passes.estimate(graph, cluster), cluster)

    def held(rank: int, channel: object) -> tuple[int, int]:
        with Pipeline(job, plan, options=Options(), channel=channel) as pipeline:
            assert pipeline.expected.peaks[rank].get("optimizer", 0) == step.peaks[rank].get("optimizer", 0)
            pipeline.step(job.batch(0, 4))
            return pipeline.weights.sizes["optimizer"], pipeline.ledger.at_peak.get("optimizer", 0)

    for stage, peak, (size, ledger) in zip(plan.stages, step.peaks, threads(2, held), strict=True):
        assert stage.memory.optimizer == peak.get("optimizer", 0) == size
        assert ledger in (0, size)
