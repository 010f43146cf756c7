"""The worked example of PipeDream-2BW (arXiv 2006.09503, figure 2): d = m = 4, F = 1 and B = 2 units of time.

Micro-batches and stages count from 1, versions from 0: F9/1@24 is the forward of micro-batch 9, which begins
at 24 with the weights that the first update has made.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
from delayed import job_of, steady_plan, trained
from small import alike

from pipeloom.ir.action import F
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.plan import Plan
from pipeloom.ir.stages import chain
from pipeloom.ir.weights import Updates
from pipeloom.lowering.passes import lower
from pipeloom.runtime.rank import Rank, RankWork
from pipeloom.schedules.registry import build_steady
from pipeloom.simulator.simulate import simulate

TABLE = (
    "F1/0@0 F2/0@1 F3/0@2 F4/0@3 B1/0@10 F5/0@12 B2/0@13 F6/0@15 B3/0@16 F7/0@18 B4/0@19 F8/0@21 B5/0@22 "
    "F9/1@24 B6/0@25 F10/1@27 B7/0@28 F11/1@30 B8/0@31 F12/1@33 B9/1@34 F13/2@36",
    "F1/0@1 F2/0@2 F3/0@3 B1/0@8 F4/0@10 B2/0@11 F5/0@13 B3/0@14 F6/0@16 B4/0@17 F7/0@19 B5/0@20 F8/0@22 "
    "B6/0@23 F9/1@25 B7/0@26 F10/1@28 B8/0@29 F11/1@31",
    "F1/0@2 F2/0@3 B1/0@6 F3/0@8 B2/0@9 F4/0@11 B3/0@12 F5/0@14 B4/0@15 F6/0@17 B5/0@18 F7/0@20 B6/0@21 "
    "F8/0@23 B7/0@24 F9/1@26 B8/0@27 F10/1@29 B9/1@30",
    "F1/0@3 B1/0@4 F2/0@6 B2/0@7 F3/0@9 B3/0@10 F4/0@12 B4/0@13 F5/0@15 B5/0@16 F6/0@18 B6/0@19 F7/0@21 "
    "B7/0@22 F8/0@24 B8/0@25 F9/1@27 B9/1@28",
)
DEPTH = MICROBATCHES = 4
UPDATES = Updates(policy="2bw", every=MICROBATCHES)


def simulated() -> dict[str, float]:
    """Action -> when it starts, with free messages."""
    stages = chain(DEPTH)
    body = build_steady("1f1b", stages, tuple(range(DEPTH)), UPDATES)
    timeline = simulate(
        lower(body.unrolled, stages, updates=UPDATES), stages, equal_costs(DEPTH), alike(DEPTH)
    )
    return {event.action: event.start_s for event in timeline.events if event.stream == "compute"}


def as_run(plan: Plan) -> dict[int, list[tuple[str, int, int]]]:
    """Per stage what a real pipeline runs: kind, micro-batch from the start of training, version."""
    seen: dict[int, list[tuple[str, int, int]]] = {}
    real, lock = Rank.parameters, threading.Lock()

    def parameters(rank: Rank, work: RankWork) -> Mapping[str, Any]:
        made = real(rank, work)
        version = rank.kept[work.key].version
        if version is not None:
            with lock:
                number = rank._microbatches[work.index].number
                seen.setdefault(work.key[0], []).append(("F" if work.kind == F else "B", number, version))
        return made

    with patch.object(Rank, "parameters", parameters):
        trained(job_of(), plan, steps=4)
    return seen


def test_the_published_table_op_for_op() -> None:
    starts, runs = simulated(), as_run(steady_plan(job_of(), DEPTH, MICROBATCHES))
    for stage, text in enumerate(TABLE):
        ran = [f"{kind}{number + 1}/{version}" for kind, number, version in runs[stage]]
        expected = text.split()
        assert ran[: len(expected)] == [word.partition("@")[0] for word in expected], f"stage {stage + 1}"
        for word in expected:
            name, _, start = word.partition("@")
            action = f"{stage}{name[0]}{int(name[1:].partition('/')[0]) - 1}"
            assert starts[action] == pytest.approx(float(start), abs=1e-6), f"stage {stage + 1}: {word}"
