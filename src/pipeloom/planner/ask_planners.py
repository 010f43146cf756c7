"""auto: other planners are each asked for the whole, and the plan with the shortest simulated step wins.

Each of the published systems looks at one axis: what is recomputed and where it is cut, which stages run side
by side, which copies the schedule has. All are judged here by the same simulator under the same caps, so no
plan of theirs is ever faster than what is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ..ir.errors import InfeasibleError, PlanError
from ..ir.plan import Plan

PREFIX = "auto."
"""Of a plan's notes that say what each planner came to: seconds of its step, or why it has no plan."""


class PlanBy(Protocol):
    """Plans by a planner; raises as `make_plan`."""

    def __call__(self, *, strategy: str, explained: bool) -> Plan: ...


def fastest_of_planners(
    plan_by: PlanBy, asked: Sequence[str], strategy: str, *, fastest: bool, explained: bool
) -> Plan:
    """The plan with the shortest simulated step of those of several planners; of equal ones the first.

    strategy: the name that the plan gets.  fastest: if not, the first plan will do.
    explained: if none has a plan, the refusal of the first says how far it is from fitting.
    Raises: InfeasibleError if nothing fits for any; PlanError if none can plan this.
    """
    plans: dict[str, Plan] = {}
    refusals: dict[str, PlanError] = {}
    for name in asked:
        try:
            plans[name] = plan_by(strategy=name, explained=False)
        except PlanError as error:
            refusals[name] = error
        if plans and not fastest:
            break
    if not plans:
        unfit = [name for name in asked if isinstance(refusals[name], InfeasibleError)]
        if not unfit or not explained:
            raise refusals[(unfit or asked)[0]]
        return plan_by(strategy=unfit[0], explained=True)  # raises, and says more
    return fastest_named(plans, refusals, strategy)


def fastest_named(plans: Mapping[str, Plan], refusals: Mapping[str, PlanError], strategy: str) -> Plan:
    """The fastest of the plans of several planners, with a note on what each came to.

    plans, refusals: by the planner's name.  strategy: the name that the plan gets.
    """
    best = min(plans.values(), key=lambda plan: plan.predicted_step_s)
    told = {f"{PREFIX}{name}": repr(plan.predicted_step_s) for name, plan in plans.items()}
    told |= {f"{PREFIX}{name}": error.message for name, error in refusals.items() if name not in plans}
    return replace(best, planner=strategy, notes={**best.notes, **told})


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
