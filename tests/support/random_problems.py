"""Random search problems: chains and graphs of stages, on one rank or several, with limits."""

from __future__ import annotations

import random
from dataclasses import replace

from pipeloom.schedules.search.problem import SearchProblem, SearchStage


def random_case(seed: int) -> SearchProblem:
    """A small case that CP-SAT solves: up to 4 stages on up to 3 ranks, up to 4 micro-batches."""
    draw = random.Random(seed)
    ranks, count = draw.randint(1, 3), draw.randint(2, 4)
    stages = []
    for s in range(count):
        chain = draw.random() < 0.6
        after = [s - 1] if chain and s else [p for p in range(s) if draw.random() < 0.4]
        several = ranks > 1 and draw.random() < 0.2
        where = draw.sample(range(ranks), 2) if several else [s % ranks]
        stages.append(_stage(draw, s, after, where, split=draw.random() < 0.4, whole=True))
    used = sorted({r for stage in stages for r in stage.ranks})
    return SearchProblem(
        stages=tuple(_renumbered(stage, used) for stage in stages),
        microbatches=draw.randint(1, 4),
        transfer_s=draw.choice([0.0, 0.0, 1.0]),
        caps=tuple([float(draw.randint(4, 12))] * len(used)) if draw.random() < 0.7 else (),
    )


def random_chain(seed: int) -> SearchProblem:
    """2 to 8 ranks with 1 or 2 stages each, times within half of the mean, messages, a limit of 0.3 to 2
    times the ranks in micro-batches; all backwards split or none."""
    draw = random.Random(seed)
    ranks, chunks = draw.randint(2, 8), draw.randint(1, 2)
    split = draw.random() < 0.5
    stages = [
        _stage(draw, s, [s - 1] if s else [], [s % ranks], split=split, whole=False)
        for s in range(ranks * chunks)
    ]
    unit = max(sum(stage.residual_bytes for stage in stages if r in stage.ranks) for r in range(ranks))
    cap = max(1.0, draw.uniform(0.3, 2.0) * ranks) * unit
    return SearchProblem(
        stages=tuple(stages),
        microbatches=draw.randint(ranks, 3 * ranks),
        transfer_s=draw.choice([0.0, draw.uniform(0, 0.5)]),
        caps=(cap,) * ranks,
    )


def _stage(
    draw: random.Random, s: int, after: list[int], ranks: list[int], *, split: bool, whole: bool
) -> SearchStage:
    """Times and sizes: whole numbers, or within half of the mean."""
    time = (lambda: float(draw.randint(1, 3))) if whole else (lambda: draw.uniform(0.5, 1.5))
    return SearchStage(
        name=str(s),
        forward_s=time(),
        input_grad_s=time(),
        weight_grad_s=time(),
        split=split,
        residual_bytes=float(draw.randint(1, 2)) if whole else float(draw.randint(500, 1500)),
        after=tuple(after),
        ranks=tuple(ranks),
    )


def _renumbered(stage: SearchStage, used: list[int]) -> SearchStage:
    return replace(stage, ranks=tuple(used.index(r) for r in stage.ranks))
