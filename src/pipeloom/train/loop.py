"""The training loop of one rank. Every rank runs it with the same batches; rank 0 also writes and shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from ..ir.errors import CheckpointError, PipeloomError
from ..ir.timeline import Timeline
from .config import Config
from .display import Display, StepFigures, display_for
from .rehearsals import WARM_UP_STEPS, RehearsalComparison, StepRehearsals
from .run_directory import STARTED, Metrics
from .workload import Batch, Workload, rate_share, rows_of

LONG_STEP_S = 6.0
"""Before a step that takes longer nothing runs that was not asked for: no rehearsals and no validation."""


def why_at_once(planned_s: float) -> str:
    """Why a run begins with its first step, where a step is planned to take so long; else nothing.

    >>> why_at_once(0.3)
    ''
    >>> why_at_once(17.2)[:35]
    'a step is planned to take 17 s: the'
    """
    if planned_s <= LONG_STEP_S:
        return ""
    return (
        f"a step is planned to take {planned_s:.0f} s: the run begins with its first one and rehearses none, "
        "the forecast is the plan's, and the first validation is that of validate_every"
    )


def what_runs_first(rehearsals: int, *, validates: bool) -> str:
    """What a run does before its first step, and between steps, that nobody asked for, and why.

    rehearsals: as the config has them.  validates: before the first step.

    >>> what_runs_first(0, validates=False)
    'before the first step the ranks rehearse one, which the forecast is made of'
    """
    text = "before the first step the ranks rehearse one, which the forecast is made of"
    if validates:
        text += ", and the model is validated as it begins"
    if rehearsals:
        text += (
            "; between steps rehearsals check the forecast at the machine's pace (rehearsals=0 makes none)"
        )
    return text


class Report(Protocol):
    """Figures of the last step; see `pipeloom.pipeline.StepReport`."""

    @property
    def loss(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def bubble(self) -> float: ...
    @property
    def peak_bytes(self) -> tuple[int, ...]: ...
    @property
    def grad_norm(self) -> float | None: ...


class Trainable(Protocol):
    """What the loop needs of `pipeloom.Pipeline`."""

    rank: int
    steps_done: int

    @property
    def drains_each_step(self) -> bool: ...
    def steps(self, batches: Iterable[Batch], /) -> Iterator[Report]: ...
    def evaluate(self, batch: Batch, /) -> float: ...
    def measured(self) -> Timeline: ...
    def rehearse(self) -> Timeline: ...
    def save(self, directory: Path, /, *, extra: Mapping[str, Any], keep: int) -> Path: ...
    def load(self, directory: Path, /) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """How a run ended.

    first_step: steps done when it began.  losses: step -> loss, of the run's whole life (rank 0).
    comparison: of rehearsals with the steps around them; None if there was no rehearsal.
    timeline: the measured step that stands for the run; None if no step was made.
    middle_step_s: the median of the steps since it began, without those that warm up (rank 0); None if there
        is none.
    """

    first_step: int
    steps: int
    losses: Mapping[str, list[tuple[int, float]]]
    comparison: RehearsalComparison | None
    timeline: Timeline | None
    middle_step_s: float | None = None


def train(
    pipeline: Trainable,
    config: Config,
    workload: Workload,
    out: Path,
    *,
    resume: bool,
    console: Console | None = None,
    at_once: bool = False,
) -> TrainOutcome:
    """Train until `config.steps`, from the newest checkpoint in `out` if `resume`.

    at_once: begin with a step, not with a validation, and rehearse none.

    Raises: CheckpointError on all ranks if there is nothing to resume from, or it was made with other
        data; PipeloomError on all ranks if the loss is no longer a number.
    """
    if resume:
        extra = pipeline.load(out / "checkpoint")
        if extra.get("data") != workload.data:
            raise CheckpointError(
                f"the checkpoint in {out} is of other data: {extra.get('data')}, not {workload.data}",
                hint="restore the files, or start a new run",
            )
    first = pipeline.steps_done
    with ExitStack() as stack:
        writes = pipeline.rank == 0
        metrics = stack.enter_context(Metrics(out / STARTED, after_step=first)) if writes else None
        display = stack.enter_context(
            display_for(console or Console(), rank=pipeline.rank, steps=config.steps, done=first)
        )
        pace = _steps(pipeline, config, workload, out, metrics, display, at_once=at_once)
        losses = {} if metrics is None else _losses(metrics)
        middle_s = None if metrics is None else _middle_step_s(metrics, first)
    return TrainOutcome(
        first_step=first,
        steps=pipeline.steps_done,
        losses=losses,
        comparison=pace.comparison,
        timeline=pace.measured,
        middle_step_s=middle_s,
    )


def _steps(
    pipeline: Trainable,
    config: Config,
    workload: Workload,
    out: Path,
    metrics: Metrics | None,
    display: Display,
    *,
    at_once: bool,
) -> StepRehearsals:
    pace = StepRehearsals(
        pipeline,
        first=pipeline.steps_done,
        end=config.steps,
        rehearsals=0 if at_once else config.rehearsals,
        drains=pipeline.drains_each_step,
    )
    validation = None
    if pipeline.steps_done == 0 and not at_once:
        validation = validate(pipeline, config, workload)
        if metrics is not None:
            metrics.write({"step": 0, "validation_loss": validation})
    step = pipeline.steps_done
    while step < config.steps:
        rehearsed_s = pace.before(step)
        end = _next_stop(step, config, pace)
        # Between two stops nothing is asked of the pipeline but steps, so it need not drain.
        for done, report in enumerate(pipeline.steps(map(workload.train, range(step, end))), start=step + 1):
            _refuse_no_number(done, report.loss)
            validates = done == config.steps or done % config.validate_every == 0
            if done == end:
                pace.after(done - 1)
                validation = validate(pipeline, config, workload) if validates else validation
            if metrics is not None:
                figures = _figures(done, report, config, workload, workload.train(done - 1))
                told = {"rehearsed_step_s": rehearsed_s if done == step + 1 else None}
                told["validation_loss"] = validation if validates else None
                metrics.write(figures | told)
                display.show(_shown(figures, validation))
        if end == config.steps or end % config.checkpoint_every == 0:
            extra = {"data": workload.data, "step": end}
            pipeline.save(out / "checkpoint", extra=extra, keep=config.keep_checkpoints)
        step = end
    return pace


def _next_stop(step: int, config: Config, pace: StepRehearsals) -> int:
    """How many steps are done when something else is due: a rehearsal, its measured steps, a validation, a
    checkpoint, or the end."""
    for done in range(step + 1, config.steps):
        due = done % config.validate_every == 0 or done % config.checkpoint_every == 0
        if due or pace.is_stop(done):
            return done
    return config.steps


def _refuse_no_number(step: int, loss: float) -> None:
    if not math.isfinite(loss):
        raise PipeloomError(
            f"the loss of step {step} is {loss}",
            hint="lower optimizer.learning_rate; `--resume` goes back to the newest checkpoint",
        )


def validate(pipeline: Trainable, config: Config, workload: Workload) -> float:
    """Mean loss over the validation batches, which are the same every time."""
    count = config.validation_batches
    return sum(pipeline.evaluate(workload.validation(index)) for index in range(count)) / count


def _figures(step: int, report: Report, config: Config, workload: Workload, batch: Batch) -> dict[str, Any]:
    rate, tokens = workload.rate, workload.tokens(batch)
    return {
        "step": step,
        "loss": report.loss,
        "learning_rate": None if rate is None else rate * rate_share(config, step - 1),
        "step_s": report.step_s,
        "rows_per_s": rows_of(batch) / report.step_s,
        "tokens_per_s": None if tokens is None else tokens / report.step_s,
        "bubble": report.bubble,
        "peak_bytes": list(report.peak_bytes),
        "grad_norm": report.grad_norm,
    }


def _shown(figures: Mapping[str, Any], validation: float | None) -> StepFigures:
    return StepFigures(
        step=figures["step"],
        loss=figures["loss"],
        rows_per_s=figures["rows_per_s"],
        tokens_per_s=figures["tokens_per_s"],
        bubble=figures["bubble"],
        peak_bytes=tuple(figures["peak_bytes"]),
        validation_loss=validation,
    )


def _middle_step_s(metrics: Metrics, first: int) -> float | None:
    """The median of the steps after `first`, without the first few where there are more."""
    took = [line["step_s"] for line in metrics.read() if line["step"] > first and "step_s" in line]
    return statistics.median(took[min(WARM_UP_STEPS, len(took) - 1) :]) if took else None


def _losses(metrics: Metrics) -> dict[str, list[tuple[int, float]]]:
    lines = metrics.read()
    names = {"train": "loss", "validation": "validation_loss"}
    return {name: [(line["step"], line[key]) for line in lines if key in line] for name, key in names.items()}
