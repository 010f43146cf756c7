"""Models cut at given places, and at every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from runs import Batch, assert_same, capture_of, pipelined, plain, plan_for

from pipeloom import Job
from pipeloom.tracer.captured import Captured

ROWS = 2
"""Of a micro-batch."""


def places(captured: Captured) -> list[str]:
    """The ops that a cut assigns, in order."""
    return [op.name for op in captured.graph.ops if not op.cheap]


def split_at(captured: Captured, *cuts: int) -> dict[str, int]:
    """Op -> stage, with cuts in front of these places."""
    return {name: sum(at >= place for place in cuts) for at, name in enumerate(places(captured))}


def assert_same_at_every_cut(
    job: Job, batches: Sequence[Batch], *, tolerance: float, alone: bool = False
) -> None:
    """Wherever a model is cut, once or (`alone`) around a single op, its numbers are those of one process."""
    captured = capture_of(job, ROWS)
    expected = plain(job, batches, 2)
    inner = range(1, len(places(captured)))
    for cuts in pairwise(inner) if alone else ((place,) for place in inner):
        plan = plan_for(captured, split_at(captured, *cuts), microbatches=2, microbatch_size=ROWS)
        assert_same(pipelined(job, plan, batches), expected, tolerance=tolerance)
