"""What branched stages gain over a chain, kept in the plan's notes so that it can be explained later."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ..ir.errors import InfeasibleError
from ..ir.plan import Plan
from .candidate import Candidate
from .joint.search import JointSearch

ALIKE = 1e-6
"""Share of the step below which two steps are as fast; the shallower pipeline then wins, which holds less."""


def faster_of(branched: JointSearch, in_a_row: JointSearch) -> Plan:
    """The faster of the plans of two searches, of which the second has stages that run one after another.

    Its notes say what both take, for whoever wants to see what branches gain: seconds, bytes of the rank that
    holds most, and stages on the longest path; and seconds of the latter as a sequential pipeline.
    Raises: as `JointSearch.run` of the first.
    """
    with suppress(InfeasibleError):
        row = in_a_row.run()
    try:
        plan = branched.run()
    except InfeasibleError:
        if in_a_row.best is None:
            raise
        return row
    if branched.best is None or in_a_row.best is None:
        return plan
    best, other = branched.best.found, in_a_row.best.found
    if row.predicted_step_s * (1 + ALIKE) < plan.predicted_step_s:
        return row
    if best.depth == len(best.parts):
        return plan
    sequential = {"no_branches.sequential_step_s": repr(other.sequential_step_s())}
    figures = {**_figures("branches", best), **_figures("no_branches", other), **sequential}
    return replace(plan, notes={**plan.notes, **figures})


def _figures(what: str, candidate: Candidate) -> dict[str, str]:
    timeline = candidate.timeline
    peak = max(timeline.rank_peaks)
    return {
        f"{what}.step_s": repr(timeline.step_s),
        f"{what}.peak_bytes": str(peak),
        f"{what}.depth": str(candidate.depth),
    }


def branch_figures(plan: Plan) -> dict[str, dict[str, float]]:
    """What a plan with branched stages takes, and what the best with a chain of stages would:
    seconds of the step, bytes of the rank that holds most, stages on the longest path; of the chain also
    seconds as a sequential pipeline, whose stages wait for each other. Empty for a chain."""
    figures: dict[str, dict[str, float]] = {}
    for key, text in plan.notes.items():
        what, _, figure = key.partition(".")
        if what in ("branches", "no_branches"):
            figures.setdefault(what, {})[figure] = float(text)
    return figures
