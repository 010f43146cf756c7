"""Memory of ranks that recompute inside their backwards: as foreseen, and less even of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from deep import ACTIVATION, ROWS, TANH, WIDTH, checkpoints
from ledgers import sends_are_through_at_once
from runs import each_rank, even_plan, residuals_of

from pipeloom import Pipeline
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan
from pipeloom.ir.timeline import Timeline


def recomputing(*, microbatches: int, ahead: tuple[int, ...] = (), split: bool = False) -> Plan:
    """Two stages of six layers, of whose residuals each keeps two."""
    how = {"microbatches": microbatches, "microbatch_size": ROWS, "schedule": "gpipe", "split": split}
    plan = even_plan(TANH, 2, **how)
    policies = tuple(checkpoints(residuals_of(TANH, plan, s), 3) for s in range(2))
    return replace(plan, memory=MemoryPolicy(stages=policies, ahead=ahead))


def peaks(plan: Plan) -> list[tuple[Mapping[str, int], Mapping[str, int]]]:
    """Of each rank, by kind: foreseen before the first step, and the ledger's."""

    def work(pipeline: Pipeline) -> tuple[Mapping[str, int], Mapping[str, int]]:
        for seed in range(2):
            pipeline.step(TANH.batch(seed, plan.microbatches * ROWS))
        return pipeline.expected.peaks[pipeline.rank], dict(pipeline.ledger.at_peak)

    with sends_are_through_at_once():
        return each_rank(TANH, plan, work)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ahead", "split"), [((), False), ((), True), ((0,), False), ((0, 1), True)])
def test_the_ledger_sees_what_was_foreseen(ahead: tuple[int, ...], split: bool) -> None:
    """Where W has the peak, a weight's gradient is on top of a message of I: that is gone by then here."""
    weight = WIDTH * WIDTH * 4 if split else 0
    for foreseen, seen in peaks(recomputing(microbatches=4, ahead=ahead, split=split)):
        assert sum(seen.values()) <= sum(foreseen.values()) <= sum(seen.values()) + weight


def test_of_one_micro_batch_memory_is_saved_too() -> None:
    plan = recomputing(microbatches=1)
    inside, ahead, kept = (
        [sum(seen.values()) for _, seen in peaks(replace(plan, memory=memory))]
        for memory in (plan.memory, replace(plan.memory, ahead=(0, 1)), MemoryPolicy())
    )
    assert ahead == kept
    for less, more in zip(inside, kept, strict=True):
        assert more - less >= 2 * ACTIVATION


def test_rehearsed_are_the_actions_that_there_are(quick_rehearsals: None) -> None:
    """Those of the stage that recomputes ahead; the other one's take their time within B."""
    plan = recomputing(microbatches=2, ahead=(1,))

    def work(pipeline: Pipeline) -> tuple[Timeline, Timeline]:
        predicted = pipeline.predict()
        pipeline.step(TANH.batch(0, plan.microbatches * ROWS))
        return predicted, pipeline.measured()

    for timeline in each_rank(TANH, plan, work)[0]:
        actions = [event.action for event in timeline.events if event.stream == "compute"]
        assert sorted(a for a in actions if "RECOMPUTE" in a) == ["1RECOMPUTE0", "1RECOMPUTE1"]
        assert {"0B0", "0B1", "1B0", "1B1"} <= set(actions)
