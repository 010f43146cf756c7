"""What a plan's notes say of what it was compared with: plans of several planners, chains of stages, 1F1B.

Notes are texts by key, so that a saved plan can be explained later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..ir.errors import PlanError, ScheduleError
from ..ir.plan import Plan
from ..ir.text import format_bytes
from .candidate import Candidate
from .refine import fit_caps
from .request import Request, profile_of
from .search.even_ranks import even_ranks

PREFIX = "auto."
"""Of a plan's notes that say what each planner came to: seconds of its step, or why it has no plan."""

FOUND_BY = "found_by"
"""Note of a plan: which of several planners found it."""

ALIKE = 1e-6
"""Share of the step below which two steps are as fast; the shallower pipeline then wins, which holds less."""

ONE_STAGE_EACH = "1f1b"
"""The schedule with one stage on each rank, and what the notes on it begin with."""

STEP_BESIDE = f"{ONE_STAGE_EACH}.step_s"
"""Note: seconds of its step."""

CLEARLY = 0.03
"""Share by which a plan is faster than a quick cut for 1F1B where its planner is not asked for one."""


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
    peak = max(timeline.peak_bytes(rank) for rank in range(timeline.ranks))
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


def beside_1f1b(
    request: Request, plan: Plan, find: Callable[[Request], Candidate | None], *, chains: bool
) -> Plan:
    """The plan; if it is slower than the first that its planner finds for 1F1B under the same caps, with
    notes on that: seconds of its step, bytes of the rank that holds most, and the op that takes longest.

    find: that candidate of a request; None if none keeps its caps.  chains: the planner's stages are a chain.
    """
    branches = request.options.branches and not chains
    other = replace(request, options=replace(request.options, schedule=ONE_STAGE_EACH, branches=branches))
    try:
        other.refuse_what_cannot_be()
        search = other.search()
        quick = even_ranks(search, other.layout.placement, other.microbatches)
        least_s = (1 - CLEARLY) * fit_caps(other, search, quick).timeline.step_s if quick else 0.0
        found = find(other) if plan.predicted_step_s > least_s else None
    except (PlanError, ScheduleError):  # 1F1B cannot be planned, so there is nothing to compare with
        return plan
    if found is None or found.timeline.step_s >= plan.predicted_step_s:
        return plan
    profile = profile_of(request.profile, request.cluster.devices[0].name, request.graph)
    seconds = {
        op.name: profile.costs[op.name].forward_s + profile.costs[op.name].backward_s
        for op in request.graph.ops
    }
    longest = max(seconds, key=seconds.__getitem__)
    notes = {
        "step_s": repr(found.timeline.step_s),
        "peak_bytes": str(max(map(found.timeline.peak_bytes, range(found.timeline.ranks)))),
        "op": longest,
        "op_s": repr(seconds[longest]),
    }
    told = {f"{ONE_STAGE_EACH}.{key}": text for key, text in notes.items()}
    return replace(plan, notes={**plan.notes, **told})


def slower_than_1f1b(plan: Plan) -> list[str]:
    """The sentence on these notes; none for a plan that has none, or is faster after all."""
    begin = f"{ONE_STAGE_EACH}."
    told = {key.removeprefix(begin): text for key, text in plan.notes.items() if key.startswith(begin)}
    other_s = float(plan.notes.get(STEP_BESIDE, "inf"))
    if other_s >= plan.predicted_step_s:
        return []
    turns = [part.forward_s + part.input_grad_s + part.weight_grad_s for part in plan.stages]
    ranks = max(plan.placement) + 1
    share_s, op_s = sum(turns) / ranks, float(told["op_s"])
    if op_s > share_s * plan.replicas:
        stage = next(k for k, part in enumerate(plan.stages) if told["op"] in part.ops)
        why = (
            f"op {told['op']} takes {op_s * 1e3:.4g} ms of {sum(turns) * 1e3:.4g} ms per micro-batch, more "
            f"than a rank's share of {share_s * 1e3:.4g} ms: it fills rank {plan.placement[stage]}, and more "
            "stages on each rank do not change that"
        )
    else:
        busy = [0.0] * ranks
        for index, rank in enumerate(plan.placement):
            busy[rank] += plan.microbatches / plan.replicas * turns[index % len(turns)]
        why = f"its busiest rank computes for {max(busy) * 1e3:.4g} ms of its step, and waits for the rest"
    slower = plan.predicted_step_s / other_s - 1
    return [
        f"slower by {slower:.1%} than {ONE_STAGE_EACH}, with which a step takes {other_s * 1e3:.4g} ms and "
        f"no rank holds more than {format_bytes(int(told['peak_bytes']))}: {why}"
    ]
