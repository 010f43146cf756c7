"""Pipelines side by side: a plan for one becomes one for several, each with its share of the micro-batches.

    one pipeline    stage s on rank p(s)
    width W         stage s of replica r on rank p(s) * W + r, and numbered r * S + s, for S stages

Replicas of a stage are on neighbouring ranks, which sum their gradients: these are the ranks that share a
node, or a faster link. What a replica sends to the next stage goes W ranks further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .action import Action
from .errors import PlanError
from .plan import Plan
from .schedule import Schedule


def widened(plan: Plan, width: int) -> Plan:
    """So many pipelines side by side, each as a plan says.

    Caps and peaks are those of the plan's rank for all its replicas, and the predicted step is the plan's:
    sums over replicas are not in it.
    Raises: PlanError if the plan has replicas already.

    >>> from pipeloom.ir.plan import StagePlan
    >>> one = Plan(
    ...     graph="", planner="", stages=(StagePlan(ops=("a",)), StagePlan(ops=("b",))), placement=(0, 1),
    ...     schedule="1f1b", schedule_rows=("0F0 0B0", "1F0 1B0"), microbatches=1,
    ... )
    >>> two = widened(one, 2)
    >>> two.placement, two.microbatches
    ((0, 2, 1, 3), 2)
    >>> two.schedule_rows
    ('0F0 0B0', '2F0 2B0', '1F0 1B0', '3F0 3B0')
    """
    if width == 1:
        return plan
    if plan.replicas != 1:
        raise PlanError(
            f"schedule {plan.schedule} runs {plan.replicas} replicas of each stage by itself, and cannot be "
            f"run {width} times side by side",
            hint="leave out --replicas, or choose a schedule of one direction",
        )
    shape = plan.as_schedule if plan.steady is None else plan.steady
    count = len(plan.stages)

    def moved(action: Action, replica: int) -> Action:
        return replace(action, stage=action.stage + replica * count)

    replicas = range(width)
    text = Schedule(
        name=plan.schedule,
        microbatches=shape.microbatches,
        placement=tuple(home * width + replica for replica in replicas for home in plan.placement),
        rows=tuple(
            tuple(moved(action, replica) for action in row) for row in shape.rows for replica in replicas
        ),
        pairs=tuple((moved(a, replica), moved(b, replica)) for a, b in shape.pairs for replica in replicas),
    )
    return replace(
        plan,
        placement=text.placement,
        schedule_rows=tuple(str(text).splitlines()),
        microbatches=plan.microbatches * width,
        caps=repeated(plan.caps, width),
        peaks=repeated(plan.peaks, width),
        width=width,
    )


def repeated(sizes: Sequence[int], width: int) -> tuple[int, ...]:
    """What holds of each rank of one pipeline, for the ranks of several.

    >>> repeated((3, 4), 2)
    (3, 3, 4, 4)
    """
    return tuple(size for size in sizes for _ in range(width))
