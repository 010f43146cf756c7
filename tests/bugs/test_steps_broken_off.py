"""What a step that was broken off had offloaded kept its place, and went on changing the ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import zoo

from pipeloom import Options, Pipeline
from pipeloom.ir.action import RELOAD, B
from pipeloom.ir.memory import MemoryPolicy
from pipeloom.ir.stages import cut
from pipeloom.runtime.file_tier import FileTier
from pipeloom.tracer.functions import stage_residuals

JOB = zoo.job("skips")


@pytest.mark.parametrize("kind", [RELOAD, B])
def test_the_next_step_starts_from_nothing(kind: Any, tmp_path: Path) -> None:
    """Ctrl-C, as in a notebook, in front of the first action of a kind."""
    captured = runs.capture_of(JOB, 2)
    plan = runs.even_plan(JOB, 1, microbatches=4, schedule="gpipe")
    residuals = stage_residuals(captured, cut(captured.graph, runs.even(captured.graph, 1)), 0)
    plan = replace(plan, memory=MemoryPolicy(stages=(dict.fromkeys(residuals, "offload"),)))

    def stop(action: object) -> None:
        raise KeyboardInterrupt

    with Pipeline(JOB, plan, options=Options(offload_dir=tmp_path)) as pipeline:
        worker, tier = pipeline.worker, pipeline.tier
        assert isinstance(tier, FileTier)
        pipeline.step(JOB.batch(0, 8))
        levels = dict(pipeline.ledger.levels)
        for _ in range(2):
            handlers = dict(worker.handlers)
            worker.handlers[kind] = stop
            with pytest.raises(KeyboardInterrupt):
                pipeline.step(JOB.batch(1, 8))
            worker.handlers = handlers
            pipeline.step(JOB.batch(2, 8))
            assert pipeline.ledger.levels == levels and pipeline.ledger.host == tier.held_bytes == 0
        assert pipeline.ledger.peak == sum(pipeline.ledger.at_peak.values())
        # However slow copies are, there are never more than a step's and those of the one broken off before.
        assert tier.peak_bytes <= 2 * plan.microbatches * sum(r.bytes for r in residuals.values())
