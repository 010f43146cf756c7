"""Steps of a plan on this machine, which trains nothing: its ranks rehearse one, and run some.

A plan is made of ops that were timed one by one. What a rank does between two ops, its messages, and that it
waits for another one's action that took longer this time, is in no op: on two cores a step takes a fifth
longer than its ops add up to. So the ranks start, make their stages as for training, and time the actions of
their rows, as the ranks of `train` do before their first step.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from ..clusters.names import machine_memory
from ..ir.errors import PipeloomError
from ..ir.plan import Plan
from ..ir.text import format_bytes, load_noun, save_noun
from ..pipeline import Pipeline
from ..plan_request import CapturedModel, PlanRequest
from ..plan_settings import PlanSettings
from ..planner.microbatch_sizes import ProfiledModel
from ..run_options import Options
from ..runnable import require_runnable, require_runnable_plan, require_training
from ..step_reports import StepReport
from ..tracer.job import Job
from .config import Config
from .loop import LONG_STEP_S
from .rank_processes import HandedModel, RankProcesses, take_over
from .workload import job_of

SHARE_OF_MEMORY = 0.5
"""What rehearsing ranks may hold together, of the machine's memory."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """rehearsed_s: seconds of a step.  reports: of the steps that were run."""

    rehearsed_s: float | None
    reports: tuple[StepReport, ...]


def measure_steps(
    settings: PlanSettings,
    plan: Plan,
    job: Job,
    processes: RankProcesses,
    *,
    model: str | None,
    planned: ProfiledModel,
    steps: int = 0,
    rehearses: bool = True,
) -> MeasuredSteps | int:
    """Let the ranks of a plan rehearse a step and run some; their exit status if they failed.

    model: names the job for the ranks, None for the built-in GPT.  planned: its model, which is not captured
    again if it was captured for these micro-batches.
    """
    config = Config(job=model)
    captured = planned.captured if isinstance(planned, CapturedModel) else None
    handed = processes.hand_over(config, job, plan, captured)
    with tempfile.TemporaryDirectory(prefix="pipeloom-steps-") as folder:
        file = Path(folder) / "steps.json"
        work = (config, plan, handed, settings, steps, rehearses, file)
        return processes.run(_measure, plan.ranks, *work) or load_noun(file, MeasuredSteps)


def _measure(
    config: Config,
    plan: Plan,
    handed: HandedModel | None,
    settings: PlanSettings,
    steps: int,
    rehearses: bool,
    file: Path,
) -> None:
    """What each rank runs; rank 0 writes the file."""
    require_runnable(settings.named_schedule)  # which loads the operations of a user's own
    job = job_of(config)
    options = Options(
        device="cpu",
        compare=False,
        clip_norm=1.0 if plan.clips else None,  # any: each takes as long
        offload_dir=settings.offload_dir,
        compile=settings.compile,
        master_weights=settings.master_weights,
    )
    with Pipeline(job, plan, options=options, captured=take_over(handed, job)) as pipeline:
        rehearsed_s = pipeline.predict().step_s if rehearses else None
        reports: tuple[StepReport, ...] = ()
        if steps:
            batch = job.batch(0, plan.microbatches * plan.microbatch_size)
            reports = tuple(pipeline.steps(repeat(batch, steps)))
        if pipeline.rank == 0:
            save_noun(MeasuredSteps(rehearsed_s=rehearsed_s, reports=reports), file)


def why_not_rehearsed(request: PlanRequest, plan: Plan) -> str:
    """Why the ranks of a plan for this machine do not rehearse it; empty if they do."""
    if "RANK" in os.environ:
        return "this process is one of several ranks itself"
    cores = os.cpu_count() or 1
    if (ranks := request.options.devices) > cores:
        return f"it is for {ranks} ranks, this machine has {cores} cores"
    if plan.predicted_step_s > LONG_STEP_S:
        return f"that takes as long as a few steps, and of over {LONG_STEP_S:.0f} s each"
    memory = int(SHARE_OF_MEMORY * machine_memory())
    if (need := sum(plan.peaks)) > memory:
        return f"its ranks need {format_bytes(need)} together, {format_bytes(memory)} may be used for it"
    try:
        require_runnable_plan(plan)
        require_training(plan)
    except PipeloomError as error:
        return error.message
    return ""
