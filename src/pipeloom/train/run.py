"""A whole run: decide what to train and where, plan, run the ranks, report.

On one machine this process plans and runs a process for each rank. Under torchrun every process is a rank
already: rank 0 plans, and its result, or why it failed, goes to the others.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console

from ..ir.errors import CheckpointError, ConfigError, PeerError
from ..ir.memory_policy import TREATMENTS
from ..ir.plan import Plan, load_plan
from ..ir.text import finite, parse_bytes, write_whole
from ..ir.weight_policies import WEIGHT_POLICIES
from ..pipeline import Pipeline
from ..plan_request import settings_of, times_of
from ..plan_settings import PlanSettings
from ..planner.planners import searches
from ..planning import capture, plan_here, refuse_names
from ..ranks import checkpoint_step, rank_device, result_of_rank_0
from ..run_options import Options
from ..runnable import names_to_plan_by, require_runnable, require_training
from ..runtime.checkpoint_directory import complete
from ..runtime.connect import connect
from ..runtime.launch import terminate_as_exit
from ..tracer.captured import Captured
from ..tracer.job import load_job
from ..viewer import terminal
from .config import Config, Override, key_of, read_config, unused_keys, write_config
from .loop import resume_from, train, what_runs_first, why_at_once
from .rank_processes import HandedModel, RankProcesses, autocast_of, device_of, run_rank, take_over
from .replan import Replanned, Replans
from .report import RunReport
from .run_directory import find_run, has_report, run_directory
from .workload import Workload, rate_scheduler, workload_of

_log = logging.getLogger("pipeloom")

DELAY_CORRECTION, FLUSHED_SHARE = 0.8, 0.5
"""What loses least without a flush, and the share of a run's steps: see docs/results.md."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    file: Path | None = None
    overrides: tuple[Override, ...] = ()
    out: Path | None = None
    resume: bool = False
    as_json: bool = False

    @property
    def console(self) -> Console:
        """Standard output belongs to the JSON object, if one is wanted."""
        return terminal.console(stderr=self.as_json)

    @property
    def name(self) -> str:
        return _named(read_config(self.file, self.overrides)).name


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A request with everything decided; the same on every rank. model: None if each rank captures it.
    first_step: steps done before this start."""

    request: TrainRequest
    config: Config
    out: Path
    plan: Plan
    model: HandedModel | None
    first_step: int = 0


def run(request: TrainRequest, processes: RankProcesses) -> int:
    """Train; returns the exit status."""
    if "RANK" in os.environ:
        return _run_as_rank(request, processes)
    with terminate_as_exit(), run_directory(request.name, request.out, resume=request.resume) as out:
        prepared = prepare_run(request, out, processes)
        if prepared is None:
            return 0
        try:
            status = processes.run(_train_rank, prepared.plan.ranks, prepared)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C and SIGTERM
            end_undisturbed()
            print(interrupted(out), file=sys.stderr)
            raise
        if status:
            _tell_what_is_kept(prepared)
        return status


def _run_as_rank(request: TrainRequest, processes: RankProcesses) -> int:
    file = request.file
    if request.resume and file is None:
        file = find_run(request.name, request.out) / "config.toml"
    settings = read_config(file, request.overrides).pipeline
    group = connect(rank_device(Options(device=settings.device)), timeout_s=settings.timeout_s)
    with terminate_as_exit(), ExitStack() as stack:

        def prepare() -> PreparedRun | None:
            directory = run_directory(request.name, request.out, resume=request.resume)
            return prepare_run(request, stack.enter_context(directory), processes)

        prepared = result_of_rank_0(group, prepare)
        if prepared is not None:
            try:
                run_rank(_train_rank, prepared)
            except (KeyboardInterrupt, SystemExit, PeerError):
                if group.rank() == 0:
                    _tell_what_is_kept(prepared)
                raise
    return 0


def _tell_what_is_kept(prepared: PreparedRun) -> None:
    """One that failed before it got further than it was, as a resumed run that is refused, says nothing."""
    out = prepared.out
    if complete(out / "checkpoint") and checkpoint_step(out / "checkpoint") > prepared.first_step:
        print(interrupted(out), file=sys.stderr)


def prepare_run(request: TrainRequest, out: Path, processes: RankProcesses) -> PreparedRun | None:
    """Decide config and plan, and capture the model; writes nothing. None if the run has ended."""
    config, plan = decide(request, out)
    first_step = 0
    if request.resume:
        if _has_ended(config, out, request):
            return None
        first_step = checkpoint_step(out / "checkpoint")
        request.console.print(f"{out} goes on from step {first_step}", soft_wrap=True)
    workload, console, captured = workload_of(config), request.console, None
    refuse_unused(request.overrides, config, own_optimizer=workload.rate is None)
    if plan is None:
        plan, captured = make_plan(config, workload, console)
    plan = replace(plan, clips=config.plan_settings.clips)
    require_training(plan)
    fresh = not request.resume and config.pipeline.plan is None
    if fresh and (advice := against_the_delay(config, plan, own_optimizer=workload.rate is None)):
        console.print(advice, soft_wrap=True)
    with console.status("capturing"):
        model = processes.hand_over(config, workload.job, plan, captured, evaluates=True)
    return PreparedRun(request=request, config=config, out=out, plan=plan, model=model, first_step=first_step)


def decide(request: TrainRequest, out: Path) -> tuple[Config, Plan | None]:
    """The config of a run; and its plan, if it is resumed without a change of what planning reads."""
    saved = out / "config.toml"
    file = saved if request.resume and request.file is None else request.file
    config = _named(read_config(file, request.overrides))
    if request.resume and _planned_from(config) == _planned_from(read_config(saved)):
        require_runnable(config.pipeline.named_schedule)
        return config, load_plan(out / "plan.json")
    if config.pipeline.plan is not None:
        config = follow_plan(config, load_plan(Path(config.pipeline.plan)), request.overrides)
    require_runnable(config.pipeline.named_schedule)
    return config, None


def refuse_unused(overrides: tuple[Override, ...], config: Config, *, own_optimizer: bool) -> None:
    """Raises: ConfigError if something is changed that a job of the user's brings itself."""
    for key in map(key_of, overrides):
        if key.startswith(unused_keys(config, own_optimizer=own_optimizer)):
            raise ConfigError(
                f"{key} is to be changed, but {config.job} brings its own", hint="leave out one of them"
            )


def _planned_from(config: Config) -> tuple[object, ...]:
    """What planning reads. A resumed run may change all the rest and keep its plan."""
    pipeline = replace(config.pipeline, compile=False, offload_dir=None, timeout_s=300.0)
    return pipeline, config.pipeline.unsaid, config.model, config.job


def _named(config: Config) -> Config:
    """The config with the name of the user's job, unless it has a name itself."""
    if config.job is None or config.name != Config().name:
        return config
    return replace(config, name=re.sub(r"[^\w.-]+", "-", load_job(config.job).name))


def _has_ended(config: Config, out: Path, request: TrainRequest) -> bool:
    """Whether a resumed run has nothing left to do; if so, that is printed."""
    steps = checkpoint_step(out / "checkpoint")
    if steps < config.steps or not has_report(out, steps):
        return False
    request.console.print(
        f"{out} is finished: {steps} steps are done, and {config.steps} were asked for. "
        f"To train longer: --resume --steps N, with N above {steps}",
        soft_wrap=True,
    )
    if request.as_json:
        print((out / "summary.json").read_text(), end="")
    return True


def end_undisturbed() -> None:
    """This process is ending, and says what it leaves: a second and a third Ctrl-C have nothing to add."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def interrupted(out: Path) -> str:
    if not (out / "config.toml").exists():
        return f"{out} had not begun to train, and nothing of it was written"
    try:
        return (
            f"{out} is kept up to step {checkpoint_step(out / 'checkpoint')}: go on with --resume --out {out}"
        )
    except CheckpointError:
        return f"{out} has no checkpoint yet, so it cannot be resumed: remove it, or start anew elsewhere"


def make_plan(config: Config, workload: Workload, console: Console) -> tuple[Plan, Captured | None]:
    """Read the plan that the config names, or capture, profile and plan; the model too if it was captured."""
    settings = config.pipeline
    if settings.plan is not None:
        return with_caps(load_plan(Path(settings.plan)), settings.memory), None
    with console.status("capturing, profiling and planning"):
        job, device = workload.job, device_of(config)
        refuse_names(config.plan_settings)
        captured = capture(job, settings.microbatch_size, autocast=autocast_of(config), device=device)
        plan = plan_here(job, config.plan_settings, captured, device=device)
    for sentence in times_of(plan):
        console.print(sentence, soft_wrap=True)
    return plan, captured


def against_the_delay(config: Config, plan: Plan, *, own_optimizer: bool) -> str:
    """What was measured to lose least by late gradients, as far as a run without a flush does not have it.

    >>> from ..ir.plan import StagePlan
    >>> shape = {"graph": "", "planner": "", "stages": (StagePlan(ops=("a",)),), "placement": (0,)}
    >>> plan = Plan(**shape, schedule="1f1b", schedule_rows=("0F1 0B0",), microbatches=1, weights="2bw")
    >>> against_the_delay(Config(steps=80), replace(plan, delay_correction=0.3), own_optimizer=True)[-24:]
    ' --warm-up-with-flush 40'
    """
    if WEIGHT_POLICIES[plan.weights].flushes:
        return ""
    wanted = {
        "--optimizer muon+adamw": not own_optimizer and config.optimizer.name != "muon+adamw",
        f"--delay-correction {DELAY_CORRECTION}": not plan.delay_correction,
        f"--warm-up-with-flush {max(1, int(config.steps * FLUSHED_SHARE))}": not plan.warm_up_with_flush,
    }
    if not (missing := [option for option, lacks in wanted.items() if lacks]):
        return ""
    return (
        f"with --weights {plan.weights} gradients are late, which costs loss at the same step; it cost least "
        f"with (docs/without-a-flush.md): {' '.join(missing)}"
    )


def with_caps(plan: Plan, memory: str | int | None) -> Plan:
    """A plan file's plan under the caps that the config sets too; each rank's lower one counts."""
    if memory is None:
        return plan
    size = parse_bytes(memory)
    return replace(plan, caps=tuple(min(size, cap) for cap in plan.caps or (size,) * plan.ranks))


OF_RUNS = frozenset(("memory", "treatments", "offload_dir", "compile"))
"""Settings of plans that a run heeds, too, or that a plan file may have in another way."""


def follow_plan(config: Config, plan: Plan, overrides: tuple[Override, ...]) -> Config:
    """A plan file decides the ranks, the replicas, the schedule, weight versions, micro-batches,
    whether replicas share the optimizer, and, if it was made for that, that stages are compiled.

    The config keeps its own planner and schedule if nothing can be planned by the plan's: a searched order is
    no schedule. A schedule of the user's own is named by the user only: a `file.py:function` of the plan,
    whose rows say all there is, does not get into the config, since what stands there is imported.
    """
    settings = config.pipeline
    fixed = settings_of(plan) | {"planner": plan.planner, "schedule": plan.schedule}
    fixed["master_weights"] = plan.master_weights
    fixed["clips"] = settings.clips
    fixed["split_words"] = max(plan.split_words.values(), default="off")
    treated = {how for stage in plan.memory.stages for how in stage.values()} - {"keep"}
    if not treated <= set(TREATMENTS["both"] if settings.allowed is None else settings.allowed):
        fixed["treatments"] = next(name for name, some in TREATMENTS.items() if treated <= set(some))
    if settings.compile and not fixed.get("compile"):
        _log.warning(
            "the plan %s was made with the times and the memory of eager stages, the run compiles them; "
            "`pipeloom plan --compile` makes one for compiled stages",
            settings.plan,
        )
    if settings.chunks is not None:
        fixed["chunks"] = len(plan.stages) * plan.width // plan.ranks
    if settings.global_batch is not None:
        fixed["global_batch"] = plan.microbatches * plan.microbatch_size
    if (name := names_to_plan_by(plan).get("planner")) is not None and not searches(name):
        fixed["time_limit"] = None
    overridden = set(map(key_of, overrides))
    of_planning = {one.name for one in fields(PlanSettings)} - fixed.keys() - OF_RUNS
    for key in sorted(of_planning) if not config.replan else ():
        if f"pipeline.{key}" in overridden and getattr(settings, key) != getattr(PlanSettings(), key):
            raise ConfigError(
                f"pipeline.{key} is for planning, and the plan {settings.plan} is made",
                hint="leave one of them out; --set pipeline.plan= does without the plan file",
            )
    for key, value in fixed.items():
        given, known = getattr(settings, key), "none" if value is None else value
        if f"pipeline.{key}" in overridden and str(given) != str(value):
            raise ConfigError(
                f"pipeline.{key} is to be {given}, but the plan {settings.plan} has {known}",
                hint="leave one of them out; --set pipeline.plan= does without the plan file",
            )
    for key in {"planner", "schedule"} - names_to_plan_by(plan).keys():
        del fixed[key]
    return replace(config, pipeline=replace(settings, **fixed))


def _train_rank(prepared: PreparedRun) -> None:
    config = prepared.config
    require_runnable(config.pipeline.named_schedule)  # which loads the operations of a user's own
    workload = workload_of(config)
    captured = take_over(prepared.model, workload.job)
    replanned = _train_by(prepared, workload, captured, None)
    while replanned is not None and replanned.plan is not None:
        prepared = replace(prepared, plan=replanned.plan)
        replanned = _train_by(prepared, workload, captured, replanned)


def _train_by(
    prepared: PreparedRun, workload: Workload, captured: Captured | None, replanned: Replanned | None
) -> Replanned | None:
    """Train by one plan, to the end or until another is better, which is returned. replanned: what gave this
    plan in the middle of the run, which goes on from its newest checkpoint."""
    resumes = prepared.request.resume or replanned is not None
    begin_s = time.monotonic()
    config, out, plan, request = prepared.config, prepared.out, prepared.plan, prepared.request
    console = request.console
    options = Options(
        device=config.pipeline.device,
        seed=config.seed,
        clip_norm=config.optimizer.clip_norm or None,
        scheduler=rate_scheduler(config),
        autocast=autocast_of(config),
        master_weights=config.pipeline.master_weights,
        tf32=config.pipeline.tf32,
        compile=config.pipeline.compile,
        offload_dir=Path(config.pipeline.offload_dir or out),
        timeout_s=config.pipeline.timeout_s,
        compare=config.compare and not resumes and Options().compare,
    )
    with Pipeline(workload.job, plan, options=options, captured=captured) as pipeline:
        forecast = pipeline.predict(rehearsed=False)
        at_once = why_at_once(forecast.step_s)
        if pipeline.rank == 0:
            told = at_once or what_runs_first(validates=not resumes)
            console.print(told, soft_wrap=True)
        if not at_once:
            forecast = pipeline.predict()
        if resumes:
            resume_from(out, pipeline, config, workload)
        if pipeline.rank == 0:  # only now: a run that cannot begin changes nothing
            plan.save(out / "plan.json")
            write_whole(out / "config.toml", write_config(config))
        replans = None
        if config.replan and pipeline.ranks > 1:
            replans = Replans(pipeline, config, cost_s=time.monotonic() - begin_s, last=replanned)
        outcome = train(
            pipeline, config, workload, out, console=console, replans=replans, at_once=bool(at_once)
        )
        if replans is not None and outcome.steps < config.steps:
            return replans.last
        if pipeline.rank != 0:
            return None
        graph = pipeline.captured.graph
        outcome = replace(outcome, first_step=prepared.first_step)  # of this start, whatever its plans were
        report = RunReport(
            config=config,
            unused=unused_keys(config, own_optimizer=workload.rate is None),
            out=out,
            plan=plan,
            graph=graph,
            outcome=outcome,
            forecast=forecast,
        )
        report.write()
        report.print(console)
    if request.as_json:
        print(json.dumps(finite(report.figures), indent=1))
    return None
