"""Memory policies: what a slip of the pen would otherwise have done without a word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from damage import PLAN
from small import by_hand

from pipeloom.ir.errors import PlanError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.stages import chain, replicate
from pipeloom.lowering.passes import lower


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stages": ({}, {"relu": "ofload"})}, "did you mean offload?"),
        ({"stages": ({"relu": "x"},)}, "use keep, recompute, offload"),
        ({"ahead": (-1,)}, "stage -1"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        MemoryPolicy(**fields)  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stages": ({}, {}, {"relu": "offload"})}, "residuals of stage 2"),
        ({"ahead": (0, 2)}, "ahead in stage 2"),
    ],
)
def test_a_stage_too_many_is_refused_and_replicas_count_once(fields: dict[str, object], words: str) -> None:
    policy = MemoryPolicy(**fields)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=f"{words}, but the plan has 2 stages"):
        replace(PLAN, memory=policy)
    two, four = by_hand("0F0 0B0", "1F0 1B0"), by_hand("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0")
    for made, graph in ((two, chain(2)), (four, replicate(chain(2), 2))):
        lower(made, graph, policy=MemoryPolicy(stages=({}, {"relu": "offload"})))
        with pytest.raises(PlanError, match=words):
            lower(made, graph, policy=policy)
