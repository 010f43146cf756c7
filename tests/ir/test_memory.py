"""Memory policies: what a slip of the pen would otherwise have done without a word."""

from __future__ import annotations

import pytest

from pipeloom.ir.errors import PlanError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan, StagePlan
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import chain, replicate
from pipeloom.lowering.passes import lower


def test_a_mistyped_treatment_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        MemoryPolicy(stages=({}, {"relu": "ofload"}))  # type: ignore[dict-item]
    assert str(caught.value) == (
        "residual relu of stage 1 is treated as 'ofload'\nhint: did you mean offload?"
    )
    with pytest.raises(PlanError, match="hint: use keep, recompute, offload"):
        MemoryPolicy(stages=({"relu": "x"},))  # type: ignore[dict-item]


def test_stages_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="stage -1 is to recompute ahead"):
        MemoryPolicy(ahead=(-1,))


BEYOND = [
    (MemoryPolicy(stages=({}, {}, {"relu": "offload"})), "treat residuals of stage 2"),
    (MemoryPolicy(ahead=(0, 2)), "recompute ahead in stage 2"),
]


@pytest.mark.parametrize(("policy", "words"), BEYOND)
def test_a_stage_too_many_is_refused(policy: MemoryPolicy, words: str) -> None:
    stages = (StagePlan(ops=("a",)), StagePlan(ops=("b",)))
    given = dict(
        graph="",
        planner="",
        stages=stages,
        placement=(0, 1),
        schedule="1f1b",
        schedule_rows=(),
        microbatches=1,
    )
    with pytest.raises(PlanError, match=f"{words}, but the plan has 2 stages"):
        Plan(memory=policy, **given)  # type: ignore[arg-type]
    rows = parse_rows(("0F0 0B0", "1F0 1B0"))
    schedule = Schedule(name="", microbatches=1, placement=(0, 1), rows=rows)
    with pytest.raises(PlanError, match=words):
        lower(schedule, chain(2), policy=policy)


def test_replicas_count_once() -> None:
    policy = MemoryPolicy(stages=({}, {"relu": "offload"}))
    rows = parse_rows(("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"))
    schedule = Schedule(name="", microbatches=1, placement=(0, 1, 2, 3), rows=rows)
    lower(schedule, replicate(chain(2), 2), policy=policy)
    with pytest.raises(PlanError, match="the plan has 2 stages"):
        lower(schedule, replicate(chain(2), 2), policy=MemoryPolicy(ahead=(3,)))
