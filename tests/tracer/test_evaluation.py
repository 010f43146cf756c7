"""evaluate() is model.eval(): another capture, cut where training is."""

import pytest
import zoo
from odd.case import job
from odd.values import AlphaDropout
from runs import plan_for

from pipeloom.ir.errors import CutError
from pipeloom.tracer.capture import capture
from pipeloom.tracer.evaluation import capture_evaluation, cut_evaluation


def test_evaluation_updates_nothing_and_leaves_the_training_mode() -> None:
    counting = zoo.job("counting")
    captured = capture(counting, 2)
    evaluated = capture_evaluation(counting, captured, counting.batch(0, 2))
    assert captured.blueprint.model.training and captured.blueprint.model.norm.training
    assert not any(op.updates for op in evaluated.graph.ops)
    assert not any(value.needs_grad for value in evaluated.graph.value.values())


def test_a_stage_that_only_trains() -> None:
    """There is no evaluation cut for a plan with a stage of dropout alone; it says which stage."""
    dropping = job(AlphaDropout)
    captured = capture(dropping, 2)
    evaluated = capture_evaluation(dropping, captured, dropping.batch(0, 2))
    names = [op.name for op in captured.graph.ops if not op.cheap]
    norm = names.index("layer_norm")
    stage_of = {name: min(at, 1) + (at >= norm) for at, name in enumerate(names)}
    stages = plan_for(captured, stage_of, microbatches=1, schedule="gpipe").stage_graph(captured.graph)
    with pytest.raises(CutError, match="stage 1 has nothing to do"):
        cut_evaluation(evaluated.graph, captured.graph, stages)
