"""The order of a plan's stages by the schedule search, where it is faster than the library's schedule.

A planner cuts and places the stages for a schedule of the library; what these stages then take is uneven, and
their graph need be no chain. With cuts, placement and treatments as they are, the search (FlexPipe-style, see
`schedules/search`) looks for a shorter order within the memory that each rank has left. It knows of residuals
and messages only, so that its orders are simulated as any plan, and taken if they are faster and fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from ..ir.costs import StageCost
from ..ir.errors import PlanError, ScheduleError
from ..ir.flow import flow_of
from ..ir.plan import Plan
from ..ir.schedule import Schedule
from ..ir.stages import StageGraph
from ..ir.timeline import Timeline
from ..ir.weight_policies import WEIGHT_POLICIES
from ..schedules import registry
from ..schedules.search import search
from ..schedules.search.orders import lower_bound
from ..schedules.search.problem import SearchProblem, SearchStage
from .candidate import EQUAL_TIMES
from .placement import message_seconds
from .plan_costs import PlanCosts

SEARCHED = "searched"
"""The name of such an order in a plan. No schedule has it: nothing can be planned by this name."""

ORDER_OF = "order_of"
"""Note of such a plan: the schedule that its stages were planned for."""

LARGEST = 4000
"""Actions of a step from which on no order is searched for, as that would take longer than a minute."""

TIGHT, THOROUGH = (2.0, 1.5, 1.25), 1.0
"""How many times as much as a plan's own order holds, orders of little room may; effort of a second one."""

QUICK = ("priorities", "clock", "rows")
"""Engines of the search that take little time."""

FASTER = 1 - 1e-6


def with_searched_order(
    plan: Plan,
    costs: PlanCosts,
    *,
    below_s: float = inf,
    effort: float = 0.5,
    library: bool = True,
    thorough: bool = False,
) -> Plan | None:
    """The plan in the fastest order that is found; None if none is faster.

    Plans are left as they are whose weights are not flushed, that have replicas, that copy residuals, or
    whose step has more than `LARGEST` actions.
    below_s: seconds of a step that it has to be faster than, too.
    effort: of the search, see `SearchOptions`. The same for the same plan.  library: whether its schedules
    are built within the ranks' limits, too, which takes time.  thorough: whether orders that hold less than
    the ranks may are searched for, too, and all once more with more effort: the search is greedy, and may
    find then what it passes over.
    """
    if not _may_be_searched(plan):
        return None
    engines = tuple(name for name in search.ENGINES if library or name in QUICK)
    efforts = (effort, THOROUGH) if thorough else (effort,)
    stages = plan.stage_graph(costs.graph)
    best: Plan | None = None
    for problem, effort in product(_problems(plan, stages, costs, tight=thorough), efforts):
        most_s = min(below_s, (best or plan).predicted_step_s) * FASTER
        if lower_bound(problem).seconds >= most_s:
            continue
        try:
            options = search.SearchOptions(effort=effort, engines=engines, sizes=False)
            result = search.search_orders(problem, options)
        except PlanError:
            continue  # the search's idea of the limits leaves no room for one micro-batch
        rows = problem.rows([int(entry) for entry in result.best.order])
        order = Schedule(name=SEARCHED, microbatches=plan.microbatches, placement=plan.placement, rows=rows)
        found = _simulated(plan, order, costs)
        if found is not None and found.predicted_step_s < most_s:
            best = found
    return best


def _may_be_searched(plan: Plan) -> bool:
    copies = any("offload" in stage.values() for stage in plan.memory.stages)
    small = 3 * len(plan.stages) * plan.microbatches <= LARGEST
    return WEIGHT_POLICIES[plan.weights].flushes and plan.replicas == 1 and small and not copies


def _problems(plan: Plan, stages: StageGraph, costs: PlanCosts, *, tight: bool) -> Iterator[SearchProblem]:
    """What the search is asked: with backwards as a whole, and split in I and W."""
    each = costs.stages(plan)
    flow = flow_of(stages)
    seconds = message_seconds(stages, plan.placement, costs.cluster)
    edges = {(a, b): seconds(a, b) for b, before in enumerate(flow.reads_from) for a in before}
    most = residual_limits(plan, timeline := costs.simulate(plan))
    held = timeline.residual_peaks
    less = [tuple(min(pair) for pair in zip(most, (n * of for of in held), strict=False)) for n in TIGHT]
    for limits, split in product(dict.fromkeys((most, *less) if tight else (most,)), (False, True)):
        yield SearchProblem(
            stages=tuple(
                _search_stage(cost, s, sorted(flow.reads_from[s]), plan.placement[s], split=split)
                for s, cost in enumerate(each)
            ),
            microbatches=plan.microbatches,
            edge_s=edges,
            caps=limits,
        )


def _search_stage(
    cost: StageCost, number: int, after: Sequence[int], rank: int, *, split: bool
) -> SearchStage:
    return SearchStage(
        name=str(number),
        forward_s=cost.forward_s,
        # What recomputes ahead does so while its gradient is on the way, but on the same device.
        input_grad_s=cost.input_grad_s + cost.recompute_s,
        weight_grad_s=cost.weight_grad_s,
        split=split,
        residual_bytes=float(cost.residual_bytes - cost.recomputed_bytes),
        after=tuple(after),
        ranks=(rank,),
    )


def residual_limits(plan: Plan, timeline: Timeline) -> tuple[float, ...]:
    """Bytes of residuals that each rank may hold: as many as in the plan's step, and what is left under its
    cap then; none where there is no cap."""
    if not plan.caps:
        return ()
    held = timeline.residual_peaks or (0,) * timeline.ranks
    return tuple(
        float(held[rank] + max(0, cap - timeline.peak_bytes(rank))) for rank, cap in enumerate(plan.caps)
    )


def _simulated(plan: Plan, order: Schedule, costs: PlanCosts) -> Plan | None:
    """The plan in another order, with its step; None if that cannot run, or passes a cap."""
    rows = tuple(str(order).splitlines())
    notes = {key: told for key, told in plan.notes.items() if key != EQUAL_TIMES}
    found = replace(plan, schedule=order.name, schedule_rows=rows, notes={**notes, ORDER_OF: plan.schedule})
    try:
        timeline = costs.simulate(found)
    except ScheduleError:
        return None
    peaks = timeline.rank_peaks
    if any(peak > cap for peak, cap in zip(peaks, plan.caps, strict=False)):
        return None
    before, after = (registry.in_flight(one) for one in (plan.as_schedule, order))
    parts = tuple(
        replace(part, memory=replace(part.memory, residuals=part.memory.residuals * now // max(1, was)))
        for part, was, now in zip(plan.stages, before, after, strict=True)
    )
    return replace(found, stages=parts, peaks=peaks, predicted_step_s=timeline.step_s)
