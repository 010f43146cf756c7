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
from dataclasses import dataclass
from pathlib import Path

from ..ir.errors import PeerError, PipeloomError
from ..ir.plan import Plan
from ..ir.units import format_bytes
from ..options import Options
from ..pipeline import Pipeline
from ..plan_request import CapturedModel, PlanRequest
from ..planner.microbatch_sizes import ProfiledModel
from ..ranks import HandedModel, hand_over_model, take_over_model
from ..runnable import require_runnable_plan, require_training
from ..runtime.launch.launch import StartedRanks, launch
from ..tracer.job import Job
from ..tracer.job_loader import load_job
from .config import Config
from .loop import LONG_STEP_S
from .run import exit_rank, measuring
from .workload import default_job

SHARE_OF_MEMORY = 0.5
"""What rehearsing ranks may hold together, of the machine's memory."""


@dataclass(frozen=True, kw_only=True)
class PlanRehearsal:
    """What a rehearsal of a plan found.

    step_s: seconds that a step takes; None if nothing was rehearsed.  why_not: why, as a sentence's end.
    """

    step_s: float | None = None
    why_not: str = ""


def rehearse_plan(
    request: PlanRequest,
    plan: Plan,
    job: Job,
    *,
    model: str | None,
    planned: ProfiledModel | None = None,
    started: StartedRanks | None = None,
) -> PlanRehearsal:
    """Let the ranks of a plan for this machine rehearse a step of it; nothing is trained or kept.

    model: names the job for the ranks, None for the built-in GPT.  planned: its model, which is not captured
    again if it was captured for these micro-batches.
    started: processes for the ranks, if they were started already.
    Raises: CaptureError if the model cannot be captured.
    """
    if why_not := why_not_rehearsed(request, plan):
        return PlanRehearsal(why_not=why_not)
    captured = planned.captured if isinstance(planned, CapturedModel) else None
    handed = hand_over_model(job, plan, captured=captured)
    with tempfile.TemporaryDirectory(prefix="pipeloom-plan-") as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        settings = request.options
        args = (model, path, handed, measuring(settings))
        if started is not None and started.ranks == settings.devices:
            status = started.run(_rank, args)
        else:
            status = launch(_rank, settings.devices, args=args)
        if status:
            return PlanRehearsal(why_not=f"its ranks ended with exit status {status}")
        return PlanRehearsal(step_s=json.loads(_found(path).read_text()))


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


def _job(model: str | None) -> Job:
    return default_job(Config()) if model is None else load_job(model)


def _found(path: Path) -> Path:
    """Where rank 0 writes the seconds of a step, beside the plan."""
    return path.with_name("step_s.json")


def _rank(model: str | None, path: Path, handed: HandedModel | None, options: Options) -> None:
    """options: without a comparison, as it trains nothing."""
    try:
        job = _job(model)
        with Pipeline(job, path, options=options, captured=take_over_model(handed, job)) as pipeline:
            step_s = pipeline.predict().step_s
            if pipeline.rank == 0:
                _found(path).write_text(json.dumps(step_s))
    except PeerError:
        raise  # the launcher knows that the cause is elsewhere
    except PipeloomError as error:
        exit_rank(error)
