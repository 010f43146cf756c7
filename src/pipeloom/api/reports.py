"""Reports of steps: drawings and tables for a terminal, pages, traces, and why ranks were idle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from ..ir.cluster import Cluster
from ..ir.explanation import Explanation
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.timeline import Timeline
from ..lowering import lower
from ..simulator import explain_idle_time
from ..viewer import (
    Comparison,
    SizeUnit,
    StageEdge,
    StageRow,
    fold,
    gantt,
    merged,
    peak_of,
    print_report,
    sources,
    stage_edges,
    write_report,
    write_trace,
)

__all__ = [
    "Comparison",
    "SizeUnit",
    "StageEdge",
    "StageRow",
    "explain_steps",
    "fold",
    "gantt",
    "merged",
    "peak_of",
    "print_report",
    "sources",
    "stage_edges",
    "stage_rows",
    "write_report",
    "write_trace",
]

_BLOCK = re.compile(r"(.*?\.)?\d+(?=\.|$)")


def explain_steps(
    plan: Plan, graph: OpGraph, timelines: Sequence[Timeline | None], cluster: Cluster | None = None
) -> list[Explanation]:
    """One explanation per timeline that there is.

    graph: of the model that the plan was made for.  timelines: steps of the plan, predicted or measured.
    cluster: what it runs on, to know of links that ranks share.
    Raises: PlanError if the plan was made for another model.
    """
    stages = plan.replicated(plan.stage_graph(graph))
    program = lower(plan.as_schedule, stages, policy=plan.memory, updates=plan.updates, clips=plan.clips)
    shown = [timeline for timeline in timelines if timeline and timeline.events]
    return [explain_idle_time(program, timeline, stages, cluster) for timeline in shown]


def stage_rows(graph: OpGraph, plan: Plan) -> list[StageRow]:
    """What stands in each stage, for the tables."""
    stages = plan.stage_graph(graph)
    rows = []
    for stage in stages.stages:
        sizes = (graph.parameter[name].shape for name in stages.params[stage.index])
        modules = [graph.op[name].module for name in stage.ops]
        rows.append(
            StageRow(
                stage=stage.index,
                rank=plan.placement[stage.index],
                ops=len(stage.ops),
                parameters=sum(prod(shape) for shape in sizes),
                contents=contents(modules),
            )
        )
    return rows


def contents(modules: Sequence[str]) -> str:
    """The modules that ops come from, repeated blocks as one: first and last where there are many.

    >>> contents(["embed", "blocks.0.norm", "blocks.0.mlp.2", "blocks.1.norm", ""])
    'embed, blocks.0, blocks.1'
    >>> contents([f"model.layers.{n}.mlp" for n in range(9)])
    'model.layers.0 … model.layers.8'
    """
    blocks = dict.fromkeys((m[0] if (m := _BLOCK.match(name)) else name) for name in modules if name)
    names = list(blocks)
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"
