"""A whole run: decide the directory and the plan, start the ranks, train, report.

On one machine this process plans and starts a process per rank. Under torchrun every process is a rank
already: rank 0 plans, and what it found, or why it failed, goes to the others.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from rich.console import Console

from ..ir.errors import ConfigError
from ..ir.plan import Plan, load_plan
from ..ir.text_files import write_whole
from ..ir.units import parse_bytes
from ..options import Options
from ..passes import capture, profile
from ..pipeline import Pipeline
from ..plan_request import CapturedModel, times_of
from ..planning import make_request, plan_size
from ..ranks import rank_device, result_of_rank_0
from ..reports import explain_steps, stage_rows
from ..runnable import require_runnable, require_training
from ..runtime.launch.connect import connect
from ..runtime.launch.processes import terminate_as_exit
from ..tracer.job_loader import load_job
from ..viewer.stage_graph import stage_edges
from .config import Config
from .config_text import Override, key_of, read_config, write_config
from .follow_plan import follow_plan
from .loop import train, what_runs_first, why_at_once
from .rank_processes import HandedModel, RankProcesses, autocast_of, ranks_of, run_rank, take_over
from .report import predicted_step, print_end, summary, write_files
from .resuming import end_undisturbed, extended, interrupted, is_finished
from .run_directory import DirectorySnapshot, find_run, new_run, require_new
from .run_lock import RunLock
from .workload import Workload, rate_scheduler, workload_of


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What the user wants. file, out: None for the defaults. as_json: print the summary as JSON."""

    file: Path | None = None
    overrides: tuple[Override, ...] = ()
    out: Path | None = None
    resume: bool = False
    as_json: bool = False

    @property
    def console(self) -> Console:
        """Standard output belongs to the JSON object, if one is wanted."""
        console = Console(stderr=self.as_json)
        # In a log file the tables need no folding.
        return console if console.is_terminal else Console(stderr=self.as_json, width=120)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A request with everything decided; the same on every rank.

    model: captured once for all ranks, see `RankProcesses.hand_over`; None until that was done, and if each
        rank captures it.
    """

    request: TrainRequest
    config: Config
    out: Path
    snapshot: DirectorySnapshot
    model: HandedModel | None = None


def run(request: TrainRequest, processes: RankProcesses) -> int:
    """Train; returns the exit status.

    Raises: PipeloomError for what is wrong before the ranks start.
    """
    with RunLock() as lock:
        return _run_alone(request, lock, processes)


def _run_alone(request: TrainRequest, lock: RunLock, processes: RankProcesses) -> int:
    if "RANK" in os.environ:
        settings = read_config(request.file, request.overrides).pipeline
        device = rank_device(Options(device=settings.device))
        group = connect(device, timeout_s=settings.timeout_s)
        prepared = result_of_rank_0(group, lambda: prepare_run(request, processes, lock=lock))
        if not result_of_rank_0(group, lambda: _nothing_left(prepared)):
            try:
                run_rank(_train_rank, result_of_rank_0(group, lambda: with_model(prepared, processes)))
            finally:
                if dist.get_rank(group) == 0:
                    prepared.snapshot.restore(prepared.out)
        return 0
    with terminate_as_exit():
        prepared = prepare_run(request, processes, lock=lock)
        if _nothing_left(prepared):
            return 0
        ranks = ranks_of(load_plan(prepared.out / "plan.json"))
        try:
            return processes.run(_train_rank, ranks, with_model(prepared, processes))
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C and SIGTERM
            end_undisturbed()
            prepared.snapshot.restore(prepared.out)
            print(interrupted(prepared.out), file=sys.stderr)
            raise
        finally:
            prepared.snapshot.restore(prepared.out)


def _nothing_left(prepared: PreparedRun) -> bool:
    """Whether a run is resumed that has ended and has its report; prints what it is asked to."""
    request, out = prepared.request, prepared.out
    if not request.resume or not is_finished(prepared.config, out, request.console):
        return False
    if request.as_json:
        print((out / "summary.json").read_text(), end="")
    return True


def prepare_run(
    request: TrainRequest,
    processes: RankProcesses,
    plan_run: Callable[[Config, Workload, Console], PlannedRun] | None = None,
    *,
    lock: RunLock | None = None,
) -> PreparedRun:
    """Decide config, directory and plan, and write the first and the last into the second.

    plan_run: makes the plan; `make_plan` by default.  lock: takes the directory before it is read.
    """
    config = _named(read_config(request.file, request.overrides))
    if not request.resume:
        require_new(request.out)
        out, replan = None, True
    else:
        out = find_run(config.name, request.out)
        if lock is not None:
            lock.take(out)
        before = read_config(out / "config.toml")
        if request.file is None:
            config = _named(read_config(out / "config.toml", request.overrides))
            if "steps" not in map(key_of, request.overrides):
                config = extended(config, out, request.console)
        replan = _planned_from(config) != _planned_from(before)
    if replan and config.pipeline.plan is not None:
        config = follow_plan(config, load_plan(Path(config.pipeline.plan)), request.overrides)
    require_runnable(config.pipeline.schedule)
    workload = workload_of(config)
    planned = (plan_run or make_plan)(config, workload, request.console) if replan else None
    if planned is not None:
        require_training(planned.plan)
    model = None
    if planned is not None and planned.model is not None:
        model = processes.hand_over(
            config, workload.job, planned.plan, planned.model.captured, evaluates=True
        )
    # Only now: a request that cannot be planned leaves no directory behind.
    snapshot = DirectorySnapshot.of(out or request.out)
    if out is None:
        out = new_run(config.name, request.out)
        if lock is not None:
            lock.take(out)
        require_new(out)  # again: another run may have ended here in between
    try:
        if planned is not None:
            planned.plan.save(out / "plan.json")
        write_whole(out / "config.toml", write_config(config))
    except ConfigError:
        snapshot.restore(out)
        raise
    return PreparedRun(request=request, config=config, out=out, snapshot=snapshot, model=model)


def with_model(prepared: PreparedRun, processes: RankProcesses) -> PreparedRun:
    """The run with its model captured, if planning did not capture it: its plan was there already.

    Raises: CaptureError if the model cannot be captured.
    """
    if prepared.model is not None:
        return prepared
    config, plan = prepared.config, load_plan(prepared.out / "plan.json")
    with prepared.request.console.status("capturing"):
        model = processes.hand_over(config, workload_of(config).job, plan, evaluates=True)
        return replace(prepared, model=model)


def _planned_from(config: Config) -> tuple[object, ...]:
    """What planning reads. A resumed run may change all the rest and keep its plan."""
    pipeline = replace(config.pipeline, accumulate=1, compile=False, offload_dir=None, timeout_s=300.0)
    return pipeline, config.model, config.job


def _named(config: Config) -> Config:
    """A job of one's own names the run, unless the config does."""
    if config.job is None or config.name != Config().name:
        return config
    return replace(config, name=re.sub(r"[^\w.-]+", "-", load_job(config.job).name))


class PlannedRun(NamedTuple):
    """A plan, and the model if it was captured to make it."""

    plan: Plan
    model: CapturedModel | None = None


def make_plan(config: Config, workload: Workload, console: Console) -> PlannedRun:
    """Read the plan that the config names, or capture, profile and plan."""
    settings = config.pipeline
    if settings.plan is not None:
        return PlannedRun(with_caps(load_plan(Path(settings.plan)), settings.memory))
    with console.status("capturing, profiling and planning"):
        made: dict[str, Any] = {}
        if settings.device != "cpu" or settings.autocast is not None:
            captured = capture(workload.job, settings.microbatch_size, autocast=autocast_of(config))
            profiled = profile(captured, device=settings.device, compile=settings.compile)
            made = {"captured": captured, "profiled": profiled}
        clips = settings.clips or bool(config.optimizer.clip_norm)
        plan, model = plan_size(make_request(workload.job, settings, clips=clips), workload.job, **made)
    for sentence in times_of(plan):
        console.print(sentence, highlight=False, soft_wrap=True)
    return PlannedRun(plan, model)


def with_caps(plan: Plan, memory: str | int | None) -> Plan:
    """A plan file's plan under the caps that the config sets too; each rank's lower one counts.

    The run refuses to start if it does not fit.
    """
    if memory is None:
        return plan
    size = parse_bytes(memory)
    ranks = len(set(plan.placement))
    return replace(plan, caps=tuple(min(size, cap) for cap in plan.caps or (size,) * ranks))


def _train_rank(prepared: PreparedRun) -> None:
    config, out, console = prepared.config, prepared.out, prepared.request.console
    require_runnable(config.pipeline.schedule)  # which loads the operations of a user's own
    workload, planned = workload_of(config), load_plan(out / "plan.json")
    options = Options(
        device=config.pipeline.device,
        seed=config.seed,
        clip_norm=config.optimizer.clip_norm or None,
        scheduler=rate_scheduler(config),
        autocast=autocast_of(config),
        compile=config.pipeline.compile,
        accumulate=config.pipeline.accumulate,
        offload_dir=Path(config.pipeline.offload_dir or out),
        timeout_s=config.pipeline.timeout_s,
        compare=config.compare and not prepared.request.resume and Options().compare,
    )
    captured = take_over(prepared.model, workload.job)
    with Pipeline(workload.job, planned, options=options, captured=captured) as pipeline:
        forecast = pipeline.predict(rehearsed=False)
        at_once = why_at_once(forecast.step_s)
        resume = prepared.request.resume
        if pipeline.rank == 0:
            told = at_once or what_runs_first(config.rehearsals, validates=not resume)
            console.print(told, highlight=False, soft_wrap=True)
        if not at_once:
            forecast = pipeline.predict()
        outcome = train(
            pipeline,
            config,
            workload,
            out,
            resume=resume,
            console=console,
            at_once=bool(at_once),
        )
        if pipeline.rank != 0:
            return
        rows = stage_rows(pipeline.captured.graph, planned)
        figures = summary(config, out, outcome, forecast, planned)
        shown = predicted_step(outcome, forecast), outcome.timeline
        reasons = explain_steps(planned, pipeline.captured.graph, shown)
        write_files(
            config,
            out,
            outcome,
            forecast=forecast,
            rows=rows,
            edges=stage_edges(planned.stage_graph(pipeline.captured.graph)),
            figures=figures,
            caps=planned.caps,
            explanations=reasons,
        )
        print_end(console, out, outcome, forecast, rows)
    if prepared.request.as_json:
        print(json.dumps(figures, indent=1))
