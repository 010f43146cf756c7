"""Random programs that offload and recompute, and random costs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pipeloom.ir.action import Action, B, F, I, Kind
from pipeloom.ir.costs import StageCost
from pipeloom.ir.schedule import Program


def treated(program: Program, dice: Random, *, valid: bool = True) -> Program:
    """A program with actions on residuals at random places; if not `valid`, now and then at wrong ones."""
    rows = []
    for row in program.rows:
        made = list(row)
        backs = [a for a in row if isinstance(a, Action) and a.kind in (B, I)]
        for back in backs:
            kinds = dice.choice(
                ((), ("RECOMPUTE",), ("OFFLOAD", "RELOAD"), ("OFFLOAD", "RELOAD", "RECOMPUTE"))
            )
            low = made.index(replace(back, kind=F)) + 1
            for kind in kinds:
                at = dice.randint(low, made.index(back))
                if not valid and dice.random() < 0.05:
                    at = dice.randint(0, len(made))
                made.insert(at, replace(back, kind=Kind(kind)))
                low = at + 1 if valid else min(at + 1, made.index(back))
        rows.append(tuple(made))
    return replace(program, rows=tuple(rows))


def uneven(stages: int, dice: Random) -> tuple[StageCost, ...]:
    """Random times: no two events of different ranks come at the same time by chance."""
    return tuple(
        StageCost(
            forward_s=1 + dice.random(),
            backward_s=2 + dice.random(),
            input_grad_s=1 + dice.random(),
            weight_grad_s=dice.random(),
            step_s=dice.random(),
            residual_bytes=100,
            carried_bytes=10,
            offloaded_bytes=dice.randint(0, 50),
            recomputed_bytes=dice.randint(0, 50),
            offload_s=3 * dice.random(),
            reload_s=3 * dice.random(),
            recompute_s=dice.random(),
        )
        for _ in range(stages)
    )
