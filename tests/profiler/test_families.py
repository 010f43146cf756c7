"""On whole models: the table of what autograd keeps against measurement, and both against real stages."""

from functools import cache

import pytest
import zoo

from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.stages import cut
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.profiler.measure_ops import measure
from pipeloom.profiler.roofline import roofline
from pipeloom.tracer.capture import capture
from pipeloom.tracer.stage.trace import stage_functions

DROPOUT = ("gpt2", "t5")
JOBS = {name: zoo.job(name) for name in (*zoo.FAMILIES, "gpt", "two_encoders")} | {
    f"{name} with dropout": zoo.with_dropout(name) for name in DROPOUT
}


@cache
def family(name):
    """(captured, measured, estimated), once per model."""
    captured = capture(JOBS[name], 2)
    measured = measure(captured, batch=JOBS[name].batch(0, 2), budget_s=0.01)
    return captured, measured, roofline(captured.graph, cpu_cluster(1).devices[0])


@pytest.mark.sampled("gpt2", "convnet")
@pytest.mark.parametrize("name", JOBS)
def test_the_table_keeps_what_autograd_keeps(name):
    captured, measured, estimated = family(name)
    assert estimated.notes == ()
    for op in captured.graph.ops:
        real, table = measured.costs[op.name], estimated.costs[op.name]
        assert set(table.saves) == set(real.saves), f"{op.name} ({op.target})"
        assert table.extra_saved_bytes == real.extra_saved_bytes, f"{op.name} ({op.target})"
        if real.weight_grad_s > 0 and not op.view:
            assert table.weight_grad_s > 0, f"{op.name} ({op.target})"


@pytest.mark.sampled("gpt2", "convnet")
@pytest.mark.parametrize("name", JOBS)
def test_residuals_are_those_of_the_stage_functions(name):
    """The profile's saved values, summed by the planner, against the tensors that real stages keep."""
    captured, measured, _ = family(name)
    names = [op.name for op in captured.graph.ops if not op.cheap]
    graph = cut(captured.graph, {name: i * 2 // len(names) for i, name in enumerate(names)})
    options = CostOptions(microbatches=2)
    model = CostModel(captured.graph, [measured] * 2, cpu_cluster(2), options)
    for stage in range(2):
        functions = stage_functions(captured, graph, stage)
        footprint = model.stage_footprint(graph, stage)
        # Where a cut goes through the middle of attention, a reshape that copies in the whole model may not.
        assert footprint.residuals == pytest.approx(sum(functions.residual_bytes.values()), rel=0.03)
        assert (footprint.saved_inputs > 0) == bool(functions.kept_inputs & set(functions.received))
