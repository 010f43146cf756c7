"""What a run leaves for people and programs when it ends: tables, trace.json, report.html, summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ..ir.explanation import Explanation
from ..ir.plan import Plan
from ..ir.text_files import write_whole
from ..ir.timeline import Timeline
from ..viewer.chrome import write_trace
from ..viewer.html import write_report
from ..viewer.stage_graph import StageEdge
from ..viewer.tables import Comparison, StageRow, peak_of
from ..viewer.terminal import print_report
from .config import Config
from .loop import TrainOutcome


def predicted_step(outcome: TrainOutcome, forecast: Timeline) -> Timeline:
    """The prediction to show beside the measured step: of the same window, else the forecast."""
    return forecast if outcome.comparison is None else outcome.comparison.middle.predicted


def summary(
    config: Config, out: Path, outcome: TrainOutcome, forecast: Timeline, plan: Plan
) -> dict[str, Any]:
    """The figures of a run as one JSON object.

    run: its directory. steps, first_step: steps done, and done before this start. stages, width, schedule,
    microbatches: as planned. train_loss, validation_loss: [first, last] in nats per token, null before there
    is one. forecast, predicted, measured: step_s, bubble, peak_bytes and residual_peak_bytes (per rank) of
    one step, null if there is none: the forecast is made before the first step, the other two belong to one
    rehearsal and the step that it is held against, but for measured bytes, the most since the run began.
    middle_step_s: the median
    of the steps since this start, without those that warm up. forecast_error: step time of the forecast less
    that, as a share of it. step_error: predicted less measured step time, as a share of measured.
    step_error_quartiles: of the errors of all rehearsals, null for fewer than four. rehearsals: of each the
    steps done (step), step_s predicted and measured, and the number of steps (steps) that the measured one is
    the middle of.
    """
    predicted, measured, comparison = predicted_step(outcome, forecast), outcome.timeline, outcome.comparison
    return {
        "run": str(out),
        "name": config.name,
        "steps": outcome.steps,
        "first_step": outcome.first_step,
        "stages": len(plan.stages),
        "replicas": plan.width,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "train_loss": _ends(outcome.losses["train"]),
        "validation_loss": _ends(outcome.losses["validation"]),
        "forecast": _step(forecast),
        "predicted": _step(predicted),
        "measured": _step(measured),
        "middle_step_s": outcome.middle_step_s,
        "forecast_error": forecast_error(outcome, forecast),
        "step_error": predicted.step_s / measured.step_s - 1 if measured else None,
        "step_error_quartiles": comparison and comparison.quartiles,
        "rehearsals": [
            {
                "step": w.step,
                "predicted_step_s": w.predicted.step_s,
                "measured_step_s": w.measured.step_s,
                "steps": w.steps,
            }
            for w in (comparison.windows if comparison else ())
        ],
    }


def forecast_step(outcome: TrainOutcome, forecast: Timeline) -> Comparison:
    """The step time of the forecast beside the run's middle one."""
    return Comparison(
        name="step time, forecast", predicted=forecast.step_s, measured=outcome.middle_step_s or None
    )


def compared(outcome: TrainOutcome, forecast: Timeline) -> str:
    """What was held against what, in a sentence: first what users plan with, then what rehearsals say."""
    before = f"forecast before the first step: {forecast.step_s * 1e3:.0f} ms"
    error = forecast_error(outcome, forecast)
    if error is not None and outcome.middle_step_s is not None:
        before += f", off by {error:+.1%} from the middle step of {outcome.middle_step_s * 1e3:.0f} ms"
    return before if outcome.comparison is None else f"{before}; {outcome.comparison}"


def forecast_error(outcome: TrainOutcome, forecast: Timeline) -> float | None:
    """The step time forecast before the first step, less that of the run's middle step, as a share of it."""
    return forecast.step_s / outcome.middle_step_s - 1 if outcome.middle_step_s else None


def write_files(
    config: Config,
    out: Path,
    outcome: TrainOutcome,
    *,
    forecast: Timeline,
    rows: Sequence[StageRow],
    edges: Sequence[StageEdge],
    figures: Mapping[str, Any],
    caps: Sequence[int],
    explanations: Sequence[Explanation] = (),
) -> None:
    """trace.json, report.html and summary.json."""
    predicted = predicted_step(outcome, forecast)
    timelines = [t for t in (predicted, outcome.timeline) if t is not None]
    write_trace(out / "trace.json", timelines)
    write_report(
        out / "report.html",
        title=f"{config.name}: {outcome.steps} steps",
        predicted=predicted,
        measured=outcome.timeline,
        stages=rows,
        edges=edges,
        losses=outcome.losses,
        config=msgspec.to_builtins(asdict(config)),
        caps=caps,
        explanations=explanations,
        note=compared(outcome, forecast),
        forecast=forecast_step(outcome, forecast),
    )
    write_whole(out / "summary.json", json.dumps(figures, indent=1) + "\n")


def print_end(
    console: Console, out: Path, outcome: TrainOutcome, forecast: Timeline, rows: Sequence[StageRow]
) -> None:
    """Predicted against measured, the losses, and where everything is."""
    predicted = predicted_step(outcome, forecast)
    foretold = forecast_step(outcome, forecast)
    print_report(console, predicted=predicted, measured=outcome.timeline, stages=rows, forecast=foretold)
    console.print()
    console.print(compared(outcome, forecast), highlight=False, soft_wrap=True)
    for name, points in outcome.losses.items():
        if points:
            (first, before), (last, after) = points[0], points[-1]
            console.print(
                f"{name} loss: {before:.3f} at step {first}, {after:.3f} at step {last}", highlight=False
            )
    console.print(f"report: {out / 'report.html'}", highlight=False, soft_wrap=True)


def _ends(points: Sequence[tuple[int, float]]) -> list[float] | None:
    return [points[0][1], points[-1][1]] if points else None


def _step(timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    peaks = [peak_of(timeline, rank) for rank in range(timeline.ranks)]
    residuals = list(timeline.residual_peaks)
    return {
        "step_s": timeline.step_s,
        "bubble": timeline.bubble,
        "peak_bytes": peaks,
        "residual_peak_bytes": residuals,
    }
