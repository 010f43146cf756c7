"""The training loop of one rank. Every rank runs it with the same batches; rank 0 also writes and shows."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from ..ir.errors import CheckpointError, PipeloomError
from ..ir.timeline import Timeline
from ..pipeline import Pipeline
from .config import Config, read_config
from .progress import StepProgress, figures_of
from .replan import Replans
from .run_directory import METRICS, Metrics, read_metrics
from .workload import Batch, Workload, rate_share, tokens_of

Size: TypeAlias = tuple[int, float | None]
"""Rows and tokens of a batch."""

LONG_STEP_S = 6.0
"""Before a step that takes longer nothing runs that was not asked for: no rehearsal and no validation."""

WARM_UP_STEPS, SHOWN_STEPS = 3, 5
"""Steps that do not count when a run begins; steps at its end whose middle one the report shows."""


def why_at_once(planned_s: float) -> str:
    """Why a run begins with its first step, if a step is planned to take so long.

    >>> why_at_once(0.3), why_at_once(17.2)[:35]
    ('', 'a step is planned to take 17 s: the')
    """
    if planned_s <= LONG_STEP_S:
        return ""
    return (
        f"a step is planned to take {planned_s:.0f} s: the run begins with its first one and rehearses none, "
        "the forecast is the plan's, and the first validation is that of validate_every"
    )


def what_runs_first(*, validates: bool) -> str:
    """What a run does before its first step that nobody asked for, and why.

    >>> what_runs_first(validates=False)
    'before the first step the ranks rehearse one, which the forecast is made of'
    """
    text = "before the first step the ranks rehearse one, which the forecast is made of"
    return f"{text}, and the model is validated as it begins" if validates else text


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """first_step: steps done when it began.  losses: step -> loss, of the run's whole life (rank 0).
    timeline: the measured step that is shown.
    middle_step_s: the median of the steps since it began, without those that warm up (rank 0)."""

    first_step: int
    steps: int
    losses: Mapping[str, list[tuple[int, float]]]
    timeline: Timeline | None
    middle_step_s: float | None = None


def same_data(saved: object, here: str) -> bool:
    """Whether a checkpoint is of data, as `Workload.data` has it. A job's file may be named from elsewhere.

    >>> same_data("net.py:job", "there/net.py:job"), same_data("net.py:job", "net.py:other")
    (True, False)
    """
    return Path(str(saved)).name == Path(here).name


def resume_from(out: Path, pipeline: Pipeline, config: Config, workload: Workload) -> None:
    """From the newest checkpoint, with the learning rate and the weight decay that the config has by now."""
    try:
        data = pipeline.load(out / "checkpoint").get("data")
    except CheckpointError as error:
        before = read_config(out / "config.toml").job
        if before == config.job:
            raise
        raise CheckpointError(
            f"{out} is a run of {before or 'the GPT'}, not of {config.job or 'the GPT'}: {error.message}",
            hint=f"go on with {before or 'no job'}, or start a new run",
        ) from None
    if not same_data(data, workload.data):
        raise CheckpointError(
            f"the checkpoint in {out} is of other data: {data}, not {workload.data}",
            hint="restore the files, or start a new run",
        )
    share = rate_share(config, pipeline.steps_done)
    for scheduler in pipeline.schedulers:
        groups = scheduler.optimizer.param_groups
        if workload.rate is not None:  # else the job's optimizer keeps its own
            scheduler.base_lrs = [workload.rate] * len(groups)
            for group in groups:
                group |= {"initial_lr": workload.rate, "weight_decay": config.optimizer.weight_decay}
        for group, rate in zip(groups, scheduler.base_lrs, strict=True):
            group["lr"] = rate * share


def train(
    pipeline: Pipeline,
    config: Config,
    workload: Workload,
    out: Path,
    *,
    console: Console,
    replans: Replans | None = None,
    at_once: bool = False,
) -> TrainOutcome:
    """To the end, or until there is a better plan.

    at_once: begin with a step, not with a validation.
    """
    first = step = pipeline.steps_done
    shown: list[Timeline] = []
    losses: dict[str, list[tuple[int, float]]] = {}
    sizes: deque[Size] = deque()  # of the batches in flight, on rank 0
    validation = middle_step_s = metrics = progress = None
    with ExitStack() as stack:
        if pipeline.rank == 0:
            metrics = stack.enter_context(Metrics(out / METRICS, after_step=first))
            progress = stack.enter_context(StepProgress(console, steps=config.steps, done=first))
        if first == 0 and not at_once:
            validation = validate(pipeline, config, workload)
            if metrics is not None:
                metrics.write({"step": 0, "validation_loss": validation})
        while step < config.steps:
            end = _next_stop(step, config)
            better = False
            # Between two stops nothing is asked of the pipeline but steps, so it need not drain.
            batches = map(workload.train, range(step, end))
            reports = pipeline.steps(batches if metrics is None else _noting(batches, workload, sizes))
            for done, report in enumerate(reports, start=step + 1):
                if not math.isfinite(report.loss):
                    raise PipeloomError(f"the loss of step {done} is {report.loss}", hint=_remedy(done))
                if done == config.steps or (pipeline.drains_each_step and _is_shown(done, config)):
                    shown.append(pipeline.measured())
                if replans is not None:
                    replans.add(report)
                validates = done == config.steps or done % config.validate_every == 0
                if done == end and validates:
                    validation = validate(pipeline, config, workload)
                if metrics is not None and progress is not None:
                    figures = figures_of(done, report, config, workload, *sizes.popleft())
                    metrics.write(figures | {"validation_loss": validation if validates else None})
                    progress.show(figures | {"validation_loss": validation})
            if replans is not None and replans.is_due(end):
                looked = replans.after(end)
                better = looked is not None and looked.plan is not None
                if looked is not None and metrics is not None:
                    metrics.write({"step": end, "replan": looked.figures})
                    console.print(str(looked), soft_wrap=True)
            if better or end == config.steps or end % config.checkpoint_every == 0:
                extra = {"data": workload.data, "step": end}
                pipeline.save(out / "checkpoint", extra=extra, keep=config.keep_checkpoints)
            step = end
            if better:
                break
        if metrics is not None:
            lines = read_metrics(out / METRICS)
            for name, loss in (("train", "loss"), ("validation", "validation_loss")):
                losses[name] = [(n.step, getattr(n, loss)) for n in lines if getattr(n, loss) is not None]
            took = [line.step_s for line in lines if line.step > first and line.step_s is not None]
            if took:
                middle_step_s = statistics.median(took[min(WARM_UP_STEPS, len(took) - 1) :])
    return TrainOutcome(
        first_step=first,
        steps=pipeline.steps_done,
        losses=losses,
        timeline=sorted(shown, key=lambda each: each.step_s)[len(shown) // 2] if shown else None,
        middle_step_s=middle_step_s,
    )


def _noting(batches: Iterable[Batch], workload: Workload, sizes: deque[Size]) -> Iterator[Batch]:
    for batch in batches:
        sizes.append((len(next(iter(batch.values()))), tokens_of(workload.job, batch)))
        yield batch


def _remedy(step: int) -> str:
    """What helps where the loss of a step is no number."""
    if step == 1:
        return "no weight has changed yet: look at the first batch; `Pipeline(find_nan=True)` names the op"
    return "lower optimizer.learning_rate, or look at the batch; `--resume` goes back to a checkpoint, if any"


def _is_shown(done: int, config: Config) -> bool:
    """Not the first step: optimizers make their state in it, which is then not held at its peak."""
    return done > max(1, config.steps - SHOWN_STEPS)


def _next_stop(step: int, config: Config) -> int:
    """After how many steps something else is due."""
    every = config.validate_every, config.checkpoint_every, config.replan or config.steps
    return min(config.steps, *(step - step % each + each for each in every))


def validate(pipeline: Pipeline, config: Config, workload: Workload) -> float:
    count = config.validation_batches
    return sum(pipeline.evaluate(workload.validation(index)) for index in range(count)) / count
