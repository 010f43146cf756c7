"""On whole models: the table of what autograd keeps against measurement. Real stages are compared with it in
`planner/test_stage_estimates.py`."""

import nets
import pytest
from runs import capture_of

from pipeloom.clusters.names import cpu_cluster
from pipeloom.profiler.measure_ops import measure
from pipeloom.profiler.roofline import roofline

DROPOUT = ("gpt2", "t5")
JOBS = {name: nets.job(name) for name in (*nets.FAMILIES, "gpt", "two_encoders")} | {
    f"{name} with dropout": nets.with_dropout(name) for name in DROPOUT
}


@pytest.mark.sampled("gpt", "convnet")
@pytest.mark.parametrize("name", JOBS)
def test_the_table_keeps_what_autograd_keeps(name):
    captured = capture_of(JOBS[name])
    measured = measure(captured, batch=JOBS[name].batch(0, 2), budget_s=0.0)
    estimated = roofline(captured.graph, cpu_cluster(1).devices[0])
    assert estimated.notes == ()
    for op in captured.graph.ops:
        real, table = measured.costs[op.name], estimated.costs[op.name]
        assert set(table.saves) == set(real.saves), f"{op.name} ({op.target})"
        assert table.extra_saved_bytes == real.extra_saved_bytes, f"{op.name} ({op.target})"
        if real.weight_grad_s > 0 and not op.view:
            assert table.weight_grad_s > 0, f"{op.name} ({op.target})"
