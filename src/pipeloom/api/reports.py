"""Reports of steps: drawings and tables for a terminal, pages, traces, and why ranks were idle."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.cluster import Cluster
from ..ir.explanation import Explanation
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.timeline import Timeline
from ..lowering import lower
from ..simulator import explain_idle_time
from ..viewer import (
    SizeUnit,
    StageRow,
    fold,
    gantt,
    merged,
    peak_of,
    print_report,
    sources,
    write_report,
    write_trace,
)

__all__ = [
    "SizeUnit",
    "StageRow",
    "explain_steps",
    "fold",
    "gantt",
    "merged",
    "peak_of",
    "print_report",
    "sources",
    "write_report",
    "write_trace",
]


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
