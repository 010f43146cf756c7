"""What the notes of a plan whose stages run side by side say of what it was compared with.

Notes are texts by key, so that a saved plan can be explained later.
"""

from __future__ import annotations

from ..ir.plan import Plan
from .candidate import Candidate

ALIKE = 1e-6
"""Share of the step below which two steps are as fast; the shallower pipeline then wins, which holds less."""


def faster_of(dag: Candidate | None, row: Candidate | None) -> Candidate | None:
    """The faster of the best candidate and the best one whose stages run one after another.

    Its notes say what both take, for whoever wants to see what branches gain: seconds, bytes of the rank that
    holds most, and stages on the longest path; and seconds of the latter as a sequential pipeline.
    """
    if dag is None or row is None:
        return dag or row
    best = dag if dag.timeline.step_s <= row.timeline.step_s * (1 + ALIKE) else row
    if best.depth < len(best.parts):
        sequential = {"no_branches.sequential_step_s": repr(row.sequential_step_s())}
        best.notes = {
            **best.notes,
            **_figures("branches", best),
            **_figures("no_branches", row),
            **sequential,
        }
    return best


def _figures(what: str, candidate: Candidate) -> dict[str, str]:
    timeline = candidate.timeline
    peak = max(timeline.rank_peaks)
    return {
        f"{what}.step_s": repr(timeline.step_s),
        f"{what}.peak_bytes": str(peak),
        f"{what}.depth": str(candidate.depth),
    }


def branch_figures(plan: Plan) -> dict[str, dict[str, float]]:
    """What a plan takes whose stages run side by side, and what the best one would whose stages are a chain:
    seconds of the step, bytes of the rank that holds most, stages on the longest path; of the chain also
    seconds as a sequential pipeline, whose stages wait for each other. Empty for a chain."""
    figures: dict[str, dict[str, float]] = {}
    for key, text in plan.notes.items():
        what, _, figure = key.partition(".")
        if what in ("branches", "no_branches"):
            figures.setdefault(what, {})[figure] = float(text)
    return figures
