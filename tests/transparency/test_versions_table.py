"""The worked example of PipeDream-2BW (arXiv 2006.09503, figure 2): d = m = 4, F = 1 and B = 2 units of time.

Micro-batches count from 1: F9@24 is the forward of micro-batch 9, which begins at 24. Which weights it uses:
`test_versions.py`.
"""

from __future__ import annotations

import pytest
from small import alike

from pipeloom.ir.costs import equal_costs
from pipeloom.ir.stages import chain
from pipeloom.ir.weight_policies import Updates
from pipeloom.lowering.passes import lower
from pipeloom.schedules.registry import build_steady
from pipeloom.simulator.simulate import simulate

TABLE = (
    "F1@0 F2@1 F3@2 F4@3 B1@10 F5@12 B2@13 F6@15 B3@16 F7@18 B4@19 F8@21 B5@22 F9@24 B6@25 F10@27 B7@28 "
    "F11@30 B8@31 F12@33 B9@34 F13@36",
    "F1@1 F2@2 F3@3 B1@8 F4@10 B2@11 F5@13 B3@14 F6@16 B4@17 F7@19 B5@20 F8@22 B6@23 F9@25 B7@26 F10@28 "
    "B8@29 F11@31",
    "F1@2 F2@3 B1@6 F3@8 B2@9 F4@11 B3@12 F5@14 B4@15 F6@17 B5@18 F7@20 B6@21 F8@23 B7@24 F9@26 B8@27 "
    "F10@29 B9@30",
    "F1@3 B1@4 F2@6 B2@7 F3@9 B3@10 F4@12 B4@13 F5@15 B5@16 F6@18 B6@19 F7@21 B7@22 F8@24 B8@25 F9@27 B9@28",
)
DEPTH = MICROBATCHES = 4
UPDATES = Updates(policy="2bw", every=MICROBATCHES)


def test_the_published_table_op_for_op() -> None:
    """Messages take no time."""
    stages = chain(DEPTH)
    body = build_steady("1f1b", stages, tuple(range(DEPTH)), UPDATES)
    program = lower(body.unrolled, stages, updates=UPDATES)
    timeline = simulate(program, stages, equal_costs(DEPTH), alike(DEPTH))
    starts = {event.action: event.start_s for event in timeline.events if event.stream == "compute"}
    for stage, text in enumerate(TABLE):
        for word in text.split():
            name, _, start = word.partition("@")
            assert starts[f"{stage}{name[0]}{int(name[1:]) - 1}"] == pytest.approx(float(start), abs=1e-6), (
                word
            )
