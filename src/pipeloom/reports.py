"""Reports of steps and schedules: rows of tables, pages, and why ranks were idle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

from .ir.cluster import Cluster
from .ir.explanation import Explanation
from .ir.graph import OpGraph
from .ir.plan import Plan
from .ir.text import SizeUnit, show_microbatches, show_share
from .ir.timeline import Timeline
from .lowering.passes import lower
from .planner.search.layer_groups import layer_names
from .schedules.scenario import UNIT, SimulatedSchedule, explain
from .simulator.idle_time.explain import explain_idle_time
from .viewer.comparisons import StageRow
from .viewer.html import report_page

MICROBATCHES = SizeUnit(name="micro-batches", bytes=UNIT)
"""What memory is counted in where the bytes of residuals are not known."""

MOST_NAMES = 4
"""Of a stage, before only the first and the last of a container are shown."""


def explain_steps(
    plan: Plan, graph: OpGraph, timelines: Sequence[Timeline | None], cluster: Cluster | None = None
) -> list[Explanation]:
    """One explanation per timeline that there is. graph: of the model that the plan was made for.
    cluster: what it runs on, to know of links that ranks share."""
    stages = plan.replicated(plan.stage_graph(graph))
    program = lower(plan.as_schedule, stages, policy=plan.memory, updates=plan.updates, clips=plan.clips)
    shown = [timeline for timeline in timelines if timeline and timeline.events]
    return [explain_idle_time(program, timeline, stages, cluster) for timeline in shown]


def stage_rows(graph: OpGraph, plan: Plan) -> list[StageRow]:
    """Of one replica."""
    stages = plan.stage_graph(graph)
    layer_of = layer_names(graph.ops)
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
                contents=contents([layer_of[module] or module for module in modules]),
                replicas=plan.replicas,
            )
        )
    return rows


def contents(parts: Sequence[str]) -> str:
    """The layers and other modules that ops come from, in order: each once, of many in a row of one container
    the first and the last, and so of all where that is still long.

    >>> contents(["embed", "blocks.0", "blocks.0", "blocks.1", ""])
    'embed, blocks.0, blocks.1'
    >>> contents([*(f"towers.0.layers.{n}" for n in range(9)), "towers.1.layers.0", "head"])
    'towers.0.layers.0 … towers.0.layers.8, towers.1.layers.0, head'
    >>> contents([f"tables.{n}.{name}" for n in range(3) for name in ("up", "down")])
    'tables.0.up … tables.2.down'
    """
    names = list(dict.fromkeys(filter(None, parts)))
    if len(names) <= MOST_NAMES:
        return ", ".join(names)

    def container(name: str) -> str:
        """What entries of one numbered container share; of any other module its own name."""
        before, _, number = name.rpartition(".")
        return before if number.isdecimal() else name

    rows = [list(row) for _, row in groupby(names, key=container)]
    shown = [name for row in rows for name in ([f"{row[0]} … {row[-1]}"] if len(row) > 2 else row)]
    return ", ".join(shown) if len(shown) <= MOST_NAMES else f"{names[0]} … {names[-1]}"


def schedule_page(simulated: SimulatedSchedule) -> str:
    """The page of a schedule: its drawing, the reason for each gap, and memory."""
    schedule, count = simulated.schedule, show_microbatches(simulated.microbatches)
    return report_page(
        title=f"{schedule.name}: {schedule.ranks} ranks, {count}, simulated",
        predicted=simulated.timeline,
        explanations=[explain(simulated)],
        size_unit=None if simulated.peaks_bytes else MICROBATCHES,
        seconds=bool(simulated.peaks_bytes),  # known from the same file
    )


def rank_columns(simulated: SimulatedSchedule) -> dict[str, list[str]]:
    """What stands beside the ranks of a drawn schedule, by its heading."""
    by_rank = simulated.by_rank()
    return {
        "bubble": [show_share(rank["bubble"]) for rank in by_rank],
        "peak": [f"{rank['peak']:.4g}" for rank in by_rank],
    }
