"""What the runtime can run, and the sentence for what it cannot."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from .checks.schedules import forwards_in_order
from .ir.errors import ConfigError, PlanError, ScheduleError, shown
from .ir.plan import Plan
from .ir.weight_policies import WEIGHT_POLICIES
from .plan_settings import PlanSettings
from .planner.planners import planner
from .schedules import registry
from .schedules.language.names import parse_name

if TYPE_CHECKING:
    from .tracer.captured import Captured


def require_runnable(schedule: str) -> None:
    """Refuse a schedule of the library that the runtime cannot run, before anything starts.

    schedule: its name as the user gave it; `file.py:function` is loaded, so that its operations are known. Of
        a plan, which may come from anywhere, ask `require_runnable_plan`. Any other name that the library
        does not know is only checked when built.
    """
    parsed = parse_name(schedule)
    if not parsed.in_python and parsed.family not in registry.names():
        return
    if lacks := registry.entry(schedule).lacks:
        raise ScheduleError(
            f"schedule {parsed.family} cannot be run: it needs {lacks}, which the runtime does not have",
            hint="it can be checked, simulated and drawn; to run, choose another one: pipeloom schedule list",
        )


def require_runnable_plan(plan: Plan) -> None:
    """A plan has its rows: no file that it names is opened."""
    refuse_without_delay(plan, plan.weights)
    if not parse_name(plan.schedule).in_python:
        require_runnable(plan.schedule)
        return
    try:
        assert plan.as_schedule  # its rows are read here
    except ScheduleError as error:
        raise ScheduleError(
            f"in a plan for schedule {shown(plan.schedule)}: {error.message}",
            hint="no file is imported because a plan names it: if you trust it, give it as --schedule, "
            "or import it in your own script",
        ) from None


def names_to_plan_by(plan: Plan) -> dict[str, str]:
    """The plan's "planner" and "schedule", if others can be planned by these names: if they are known, and no
    file is imported for them."""
    names = {}
    with suppress(PlanError):
        planner(plan.planner)
        names["planner"] = plan.planner
    if parse_name(plan.schedule).in_python:
        return names
    with suppress(ScheduleError):
        if not parse_name(plan.schedule).in_file:  # a list of actions is read when it is used
            registry.entry(plan.schedule)
        names["schedule"] = plan.schedule
    return names


def require_training(plan: Plan) -> None:
    if not plan.as_schedule.columns.trains:
        raise ScheduleError(
            f"schedule {plan.schedule} has no backwards: it cannot train",
            hint="evaluate with it (Pipeline.evaluate), or plan for another schedule",
        )


def refuse_master_weights(policy: str) -> None:
    """Raises: ConfigError if parameters have versions under this policy for their updates."""
    if not WEIGHT_POLICIES[policy].flushes:
        raise ConfigError(
            f"master weights are kept of one version of the parameters, and with weights {policy} there are "
            "several",
            hint="leave out master_weights, or plan with weights=flush",
        )


def refuse_without_delay(asked: PlanSettings | Plan, policy: str) -> None:
    """Raises: ConfigError if it has something that softens a delay, and there is none under this policy."""
    softens = [name for name in ("delay_correction", "warm_up_with_flush") if getattr(asked, name)]
    if softens and WEIGHT_POLICIES[policy].flushes:
        raise ConfigError(
            f"{' and '.join(softens)} given, but weights are updated with a {policy}, so no gradient is late",
            hint="plan with weights=2bw, or leave it out",
        )


def refuse_torn_updates(plan: Plan, captured: Captured) -> None:
    """Replicas of a stage would each update the buffers of its forward, and end with different ones; so
    would micro-batches in another order. A parameter that the forward changes may have one copy only."""
    changed = captured.cut.recording.changed_parameters if captured.cut is not None else ()
    if changed and (plan.replicas > 1 or plan.steady is not None):
        keepers = "replicas" if plan.replicas > 1 else f"versions with weights={plan.weights}"
        raise PlanError(
            f"the forward changes the parameter {changed[0]}, of which {keepers} are copies",
            hint="train it in one pipeline, by a schedule of one direction with weights=flush",
        )
    if plan.replicas > 1 and (names := sorted(captured.graph.together)):
        raise PlanError(
            f"schedule {plan.schedule} runs each stage on two ranks, but the forward updates {names[0]}",
            hint="choose a schedule of one direction, and one replica",
        )
    users = [(op, name) for name, ops in captured.graph.together.items() for op in ops]
    forwards_in_order(
        plan.as_schedule, {plan.stage_of[op]: name for op, name in users if op in plan.stage_of}
    )
