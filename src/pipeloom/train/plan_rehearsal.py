"""What a step of a new plan takes here: its ranks rehearse it, before anything is trained.

A plan is made of ops that were timed one by one. What a rank does between two ops, its messages, and that it
waits for another one's action that took longer this time, is in no op: on two cores a step takes a fifth
longer than its ops add up to. So where a plan is for this machine's own processes these start, make their
stages as for training, and time the actions of their rows, as the ranks of `train` and `bench` do before
their first step.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from ..ir.errors import PipeloomError
from ..ir.plan import Plan
from ..ir.text import format_bytes
from ..options import Options
from ..pipeline import Pipeline
from ..plan_request import CapturedModel, PlanRequest
from ..planner.microbatch_sizes import ProfiledModel
from ..runnable import require_runnable_plan, require_training
from ..tracer.job import Job
from .benchmark import options_to_measure
from .config import Config
from .loop import LONG_STEP_S
from .rank_processes import HandedModel, RankProcesses, ranks_of, take_over
from .workload import job_of

SHARE_OF_MEMORY = 0.5
"""What rehearsing ranks may hold together, of the machine's memory."""


def rehearse_plan(
    request: PlanRequest,
    plan: Plan,
    job: Job,
    processes: RankProcesses,
    *,
    model: str | None,
    planned: ProfiledModel | None = None,
) -> tuple[float | None, str]:
    """Let the ranks of a plan for this machine rehearse a step of it; nothing is trained or kept.

    model: names the job for the ranks, None for the built-in GPT.  planned: its model, which is not captured
    again if it was captured for these micro-batches.
    Returns: the seconds of a step; or None, and why it was not rehearsed, as a sentence's end.
    Raises: CaptureError if the model cannot be captured.
    """
    if why_not := why_not_rehearsed(request, plan):
        return None, why_not
    config = Config(job=model)
    captured = planned.captured if isinstance(planned, CapturedModel) else None
    handed = processes.hand_over(config, job, plan, captured)
    with tempfile.TemporaryDirectory(prefix="pipeloom-plan-") as folder:
        result = Path(folder) / "step_s.json"
        options = options_to_measure(request.options)
        if status := processes.run(_rehearse, ranks_of(plan), config, plan, handed, result, options):
            return None, f"its ranks ended with exit status {status}"
        return json.loads(result.read_text()), ""


def _rehearse(config: Config, plan: Plan, handed: HandedModel | None, result: Path, options: Options) -> None:
    """In each rank; rank 0 writes the seconds of a step."""
    job = job_of(config)
    with Pipeline(job, plan, options=options, captured=take_over(handed, job)) as pipeline:
        step_s = pipeline.predict().step_s
        if pipeline.rank == 0:
            result.write_text(json.dumps(step_s))


def why_not_rehearsed(request: PlanRequest, plan: Plan) -> str:
    """Why the ranks of a plan do not rehearse it: it is for other devices, this machine has too few cores or
    too little memory for them, or a step takes long. Nothing where they do."""
    if not request.local:
        return "it is for devices that are described by figures"
    if "RANK" in os.environ:
        return "this process is one of several ranks itself"
    cores = os.cpu_count() or 1
    if (ranks := request.options.devices) > cores:
        return f"it is for {ranks} ranks, this machine has {cores} cores"
    if plan.predicted_step_s > LONG_STEP_S:
        return f"that takes as long as a few steps, and of over {LONG_STEP_S:.0f} s each"
    memory = int(SHARE_OF_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if (need := sum(plan.peaks)) > memory:
        return f"its ranks need {format_bytes(need)} together, {format_bytes(memory)} may be used for it"
    try:
        require_runnable_plan(plan)
        require_training(plan)
    except PipeloomError as error:
        return error.message
    return ""
