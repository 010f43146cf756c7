"""A plan with several stages on a rank beside 1F1B, which has one: where it is slower, its notes say why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.errors import PlanError, ScheduleError
from ..ir.plan import Plan
from ..ir.text import format_bytes
from .candidate import Candidate
from .fit_caps import fit_caps
from .request import Request, profile_of
from .search.even_ranks import even_ranks

ONE_STAGE_EACH = "1f1b"
"""The schedule with one stage on each rank, and what the notes on it begin with."""

STEP_BESIDE = f"{ONE_STAGE_EACH}.step_s"
"""Note: seconds of its step."""

CLEARLY = 0.03
"""Share by which a plan is faster than a quick cut for 1F1B where its planner is not asked for one."""


def beside_1f1b(request: Request, plan: Plan, find: Callable[[Request], Candidate | None]) -> Plan:
    """The plan; if it is slower than the first that its planner finds for 1F1B under the same caps, with
    notes on that: seconds of its step, bytes of the rank that holds most, and the op that takes longest.

    find: that candidate of a request; None if none keeps its caps.
    """
    branches = request.options.branches and request.planner.arrange is None
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
