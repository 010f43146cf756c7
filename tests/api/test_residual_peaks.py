"""The most residuals of each rank, apart from the peak of all that it holds."""

from __future__ import annotations

import pytest
from every_schedule import gpt_job, plan_of
from runs import threads

from pipeloom import Pipeline
from pipeloom.ir.action import STEP
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.stages import chain
from pipeloom.lowering.passes import lower
from pipeloom.runtime.ledger import Ledger
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate


def test_residuals_may_be_highest_when_the_rest_is_not() -> None:
    """The optimizer's step needs more than all residuals together, which are gone by then."""
    cost = StageCost(
        forward_s=1.0,
        backward_s=2.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        step_s=1.0,
        residual_bytes=10,
        transient_bytes={STEP: 100},
    )
    stages = chain(2)
    program = lower(registry.build("1f1b", stages, (0, 1), 4), stages)
    device = Device(name="any", memory_bytes=1 << 30)
    cluster = Cluster(devices=(device,) * 2, within_node=Link(bandwidth_bytes_per_s=1e9))
    step = simulate(program, stages, (cost, cost), cluster)
    assert step.residual_peaks == (20, 10)
    assert [peak["residuals"] for peak in step.peaks] == [0, 0]


def test_a_ledger_keeps_the_most_residuals() -> None:
    ledger = Ledger(0)
    ledger.set("residuals", 30)
    ledger.set("residuals", 10)
    ledger.set("transient", 90)
    assert (ledger.peak, ledger.at_peak["residuals"], ledger.residual_peak) == (100, 10, 30)
    ledger.restart_peak()
    assert ledger.residual_peak == 10


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["1f1b", "gis_h"])
def test_they_are_predicted_as_measured(name: str) -> None:
    job = gpt_job()
    plan = plan_of(job, name, 2, microbatches=4)

    def work(rank: int, channel: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
        with Pipeline(job, plan, channel=channel) as pipeline:
            predicted = pipeline.predict()
            pipeline.step(job.batch(0, 4))
            return predicted.residual_peaks, pipeline.measured().residual_peaks

    for predicted, measured in threads(2, work):
        assert predicted == measured and min(measured) > 0
