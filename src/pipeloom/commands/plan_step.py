"""What `pipeloom plan` says that a step takes, and what that figure is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ir.plan import Plan
    from ..plan_request import PlanRequest
    from ..planner.microbatch_sizes import ProfiledModel
    from ..planner.what_if import Change
    from ..tracer.job import Job
    from ..train.rank_processes import RankProcesses


STEPS_OF_BRANCHES = ("branches.step_s", "no_branches.step_s", "no_branches.sequential_step_s")
"""Notes of a plan that are seconds of a step."""


def why_no_ranks(rehearse: bool, described: bool, profile_file: Path | None) -> str:
    """Why no ranks rehearse what is asked for, whatever the plan will be; nothing where they may.

    >>> why_no_ranks(True, False, None), why_no_ranks(False, False, None)
    ('', '--no-rehearse was given')
    """
    if described:
        return "it is for devices that are described by figures"
    if profile_file is not None:
        return f"its costs are those of {profile_file}"
    return "" if rehearse else "--no-rehearse was given"


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step of a plan in seconds, and where that comes from.

    profiled_s: what the plan's ops make alone.  rehearsed_s: what its ranks rehearsed; None if they did not,
    and why_not says why.  source: of the times of ops: "profile", measured here or saved, or "roofline".
    """

    profiled_s: float
    rehearsed_s: float | None = None
    why_not: str = ""
    source: str = "profile"

    @property
    def step_s(self) -> float:
        return self.profiled_s if self.rehearsed_s is None else self.rehearsed_s

    @property
    def figures(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "predicted_step_s": self.step_s,
            "predicted_by": self.source if self.rehearsed_s is None else "rehearsal",
            "profiled_step_s": self.profiled_s,
            "not_rehearsed": self.why_not or None,
        }

    @property
    def sentence(self) -> str:
        """What the step holds.

        >>> PlannedStep(profiled_s=0.3, rehearsed_s=0.38).sentence[-38:]
        'optimizer; its ops alone make 300.0 ms'
        >>> PlannedStep(profiled_s=0.3, source="roofline", why_not="of other devices").sentence
        'that is made of ops by roofline; not rehearsed: of other devices'
        """
        if self.rehearsed_s is not None:
            return (
                "as its ranks rehearsed it here, with what they do between ops, messages, waits and the "
                f"optimizer; its ops alone make {self.profiled_s * 1e3:.1f} ms"
            )
        if self.source == "roofline":
            return f"that is made of ops by roofline; not rehearsed: {self.why_not}"
        return (
            "that is made of ops that were timed one by one, without what ranks do between them; "
            f"not rehearsed: {self.why_not}"
        )

    def told(self, plan: Plan) -> Plan:
        """The plan with this step, to print; and those beside it that its notes tell, as much more."""
        from ..planner.beside_1f1b import STEP_BESIDE

        beside = (*STEPS_OF_BRANCHES, STEP_BESIDE)
        steps = {key: str(self._scale * float(plan.notes[key])) for key in beside if key in plan.notes}
        return replace(plan, predicted_step_s=self.step_s, notes={**plan.notes, **steps})

    def scaled(self, changes: list[Change]) -> list[Change]:
        """What other plans were simulated to take, told beside this step: they gain the same share of it."""
        return [replace(c, step_s=None if c.step_s is None else self._scale * c.step_s) for c in changes]

    @property
    def _scale(self) -> float:
        return self.step_s / self.profiled_s if self.profiled_s else 1.0


def made_of_ops(plan: Plan, why_not: str, *, roofline: bool) -> PlannedStep:
    """The step that a plan was made with. why_not: rehearsed."""
    source = "roofline" if roofline else "profile"
    return PlannedStep(profiled_s=plan.predicted_step_s, why_not=why_not, source=source)


def rehearsed_step(
    request: PlanRequest,
    plan: Plan,
    planned: ProfiledModel,
    job: Job,
    processes: RankProcesses,
    *,
    model: str | None,
) -> PlannedStep:
    """The step that its ranks rehearse, unless they cannot or it would take long.

    planned: the job's model, as it was planned.  model: how the ranks find the job.
    """
    from ..train.plan_rehearsal import rehearse_plan

    step_s, why_not = rehearse_plan(request, plan, job, processes, model=model, planned=planned)
    return PlannedStep(profiled_s=plan.predicted_step_s, rehearsed_s=step_s, why_not=why_not)
