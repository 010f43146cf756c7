"""A plan in rows that people and programs can read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..ir.plan import Plan


def explain(plan: Plan) -> list[dict[str, Any]]:
    """One row per stage: what it runs, how long, and what it holds. Times in seconds, sizes in bytes."""
    rows = []
    for stage, part in enumerate(plan.stages):
        rank = plan.placement[stage]
        cap = plan.caps[rank] if plan.caps else None
        rows.append(
            {
                "stage": stage,
                "rank": rank,
                "ops": len(part.ops),
                "first_op": part.ops[0],
                "last_op": part.ops[-1],
                "forward_s": part.forward_s,
                "input_grad_s": part.input_grad_s,
                "weight_grad_s": part.weight_grad_s,
                **{f"{kind}_bytes": size for kind, size in asdict(part.memory).items()},
                "peak_bytes": part.memory.total,
                "cap_bytes": cap,
                "filled": part.memory.total / cap if cap else None,
            }
        )
    return rows
