"""auto: other planners are each asked for the whole, and the plan with the shortest simulated step wins.

Each of the published systems looks at one axis: where a model is cut and what it recomputes, which stages run
side by side, which copies the schedule has, in which order stages run. All are judged here by one simulator
under the same caps, so no plan of theirs is ever faster than what is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ..ir.errors import InfeasibleError, PlanError
from ..ir.plan import Plan
from .plan_costs import PlanCosts
from .search_order import SEARCHED, with_searched_order

PREFIX = "auto."
"""Of a plan's notes that say what each planner came to: seconds of its step, or why it has no plan."""

FOUND_BY = "found_by"
"""Note of a plan: which of several planners found it."""


class PlanBy(Protocol):
    """Plans by a planner; raises as `make_plan`."""

    def __call__(self, *, planner: str, explained: bool) -> Plan: ...


def fastest_of_planners(
    plan_by: PlanBy,
    asked: Sequence[str],
    planner: str,
    costs: PlanCosts,
    *,
    fastest: bool,
    explained: bool,
) -> Plan:
    """The plan with the shortest simulated step of those of several planners; of equal ones the first.

    The schedule search then looks for a faster order of the stages of each.

    planner: the name that the plan gets.  costs: of its stages.  fastest: if not, the first plan will do.
    explained: if none has a plan, the refusal of the first says how far it is from fitting.
    Raises: InfeasibleError if nothing fits for any; PlanError if none can plan this.
    """
    plans: dict[str, Plan] = {}
    refusals: dict[str, PlanError] = {}
    for name in asked:
        try:
            plans[name] = plan_by(planner=name, explained=False)
        except PlanError as error:
            refusals[name] = error
        if plans and not fastest:
            break
    if not plans:
        unfit = [name for name in asked if isinstance(refusals[name], InfeasibleError)]
        if not unfit or not explained:
            raise refusals[(unfit or asked)[0]]
        return plan_by(planner=unfit[0], explained=True)  # raises, and says more
    best = fastest_named(plans, refusals, planner)
    if not fastest:
        return best
    orders = (with_searched_order(plan, costs) for plan in plans.values())
    searched = min(filter(None, orders), key=lambda plan: plan.predicted_step_s, default=None)
    if searched is None or searched.predicted_step_s >= best.predicted_step_s:
        return best
    return fastest_named({**plans, SEARCHED: searched}, refusals, planner)


def fastest_named(plans: Mapping[str, Plan], refusals: Mapping[str, PlanError], planner: str) -> Plan:
    """The fastest of the plans of several planners, with notes on what each came to and whose plan it is.

    plans, refusals: by the planner's name, or by `SEARCHED`.  planner: the name that the plan gets.
    """
    best = min(plans.values(), key=lambda plan: plan.predicted_step_s)
    told = {f"{PREFIX}{name}": repr(plan.predicted_step_s) for name, plan in plans.items()}
    told |= {f"{PREFIX}{name}": error.message for name, error in refusals.items() if name not in plans}
    return replace(best, planner=planner, notes={**best.notes, **told, FOUND_BY: best.planner})


def planners_asked(plan: Plan) -> dict[str, float | None]:
    """Planner -> seconds of the step of its plan, None if it had none; empty where one planner was asked."""
    found: dict[str, float | None] = {}
    for key, text in plan.notes.items():
        if key.startswith(PREFIX):
            try:
                found[key.removeprefix(PREFIX)] = float(text)
            except ValueError:
                found[key.removeprefix(PREFIX)] = None
    return found
