"""What a run leaves for people and programs when it ends: tables, trace.json, report.html, summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.text import dotted, finite, save_noun, write_whole
from ..ir.timeline import Timeline
from ..reports import explain_steps, stage_rows
from ..viewer.chrome import write_trace
from ..viewer.comparisons import Comparison, peak_of
from ..viewer.html import write_report
from ..viewer.stage_graph import stage_edges
from ..viewer.table import Table
from ..viewer.terminal import report
from .config import Config, as_dict
from .loop import TrainOutcome
from .run_directory import TIMELINES


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """forecast: a step, as predicted before the first one.  unused: how keys of the config begin that the job
    does not use."""

    config: Config
    unused: tuple[str, ...]
    out: Path
    plan: Plan
    graph: OpGraph
    outcome: TrainOutcome
    forecast: Timeline

    @property
    def settings(self) -> dict[str, Any]:
        """Those that the job uses, by dotted key."""
        return {key: value for key, value in dotted(as_dict(self.config)) if not key.startswith(self.unused)}

    @property
    def since(self) -> str:
        """Which steps a resumed run's report is of."""
        first, last = self.outcome.first_step, self.outcome.steps
        if not 0 < first < last:
            return ""
        return (
            f"resumed at step {first}: the timelines, figures and configuration below are of steps "
            f"{first + 1} to {last}, the losses of the whole run"
        )

    @property
    def middle_step(self) -> Comparison:
        middle_s = self.outcome.middle_step_s or None
        return Comparison(name="middle step", predicted=self.forecast.step_s, measured=middle_s)

    @property
    def figures(self) -> dict[str, Any]:
        """The JSON object that the command's docstring explains."""
        outcome, measured, plan = self.outcome, self.outcome.timeline, self.plan
        return {
            "run": str(self.out),
            "name": self.config.name,
            "steps": outcome.steps,
            "first_step": outcome.first_step,
            "stages": len(plan.stages),
            "replicas": plan.width,
            "schedule": plan.schedule,
            "microbatches": plan.microbatches,
            "train_loss": _ends(outcome.losses["train"]),
            "validation_loss": _ends(outcome.losses["validation"]),
            "forecast": _step(self.forecast),
            "measured": None if measured is None else _step(measured),
            "middle_step_s": outcome.middle_step_s,
            "forecast_error": self.middle_step.error,
        }

    def __str__(self) -> str:
        text = f"forecast before the first step: {self.forecast.step_s * 1e3:.0f} ms"
        step = self.middle_step
        if step.measured is not None:
            text += f", off by {step.error_text} from the middle step of {step.measured * 1e3:.0f} ms"
        return f"{text}; float32 products in TF32" if self.config.pipeline.tf32 else text

    def write(self) -> None:
        timelines = [t for t in (self.forecast, self.outcome.timeline) if t is not None]
        plain = [replace(t, events=tuple(t.events), memory=tuple(t.memory)) for t in timelines]
        save_noun(plain, self.out / TIMELINES)
        write_trace(self.out / "trace.json", timelines)
        write_report(
            self.out / "report.html",
            title=f"{self.config.name}: {self.outcome.steps} steps",
            predicted=self.forecast,
            measured=self.outcome.timeline,
            stages=stage_rows(self.graph, self.plan),
            edges=stage_edges(self.plan.stage_graph(self.graph)),
            losses=self.outcome.losses,
            since=self.since,
            config=self.settings,
            caps=self.plan.caps,
            explanations=explain_steps(self.plan, self.graph, timelines),
            note=str(self),
            step_time=self.middle_step,
        )
        write_whole(self.out / "summary.json", json.dumps(finite(self.figures), indent=1) + "\n")

    def print(self, console: Console) -> None:
        things = report(
            predicted=self.forecast,
            measured=self.outcome.timeline,
            stages=stage_rows(self.graph, self.plan),
            step_time=self.middle_step,
            width=console.width,
        )
        for thing in things:
            console.print(thing.to_rich() if isinstance(thing, Table) else thing)
        console.print()
        console.print(str(self), soft_wrap=True)
        for name, points in self.outcome.losses.items():
            if points:
                (first, before), (last, after) = points[0], points[-1]
                line = f"{name} loss: {before:.4g} at step {first}, {after:.4g} at step {last}"
                console.print(line)
        console.print(f"report: {self.out / 'report.html'}", soft_wrap=True)


def _ends(points: Sequence[tuple[int, float]]) -> list[float] | None:
    return [points[0][1], points[-1][1]] if points else None


def _step(timeline: Timeline) -> dict[str, Any]:
    return {
        "step_s": timeline.step_s,
        "bubble": timeline.bubble,
        "peak_bytes": [peak_of(timeline, rank) for rank in range(timeline.ranks)],
        "residual_peak_bytes": list(timeline.residual_peaks),
    }
