"""The figures of a step, as metrics.jsonl has them and as people see them: on a live bar of a terminal, or in
plain lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..ir.text import format_bytes, show_share
from ..step_reports import StepReport
from .config import Config
from .workload import Workload, rate_share

LINE_EVERY = 10
"""Steps from one plain line to the next."""


def figures_of(
    step: int, report: StepReport, config: Config, workload: Workload, rows: int, tokens: float | None
) -> dict[str, Any]:
    """What is known of a step; None where it is not. A new figure goes here, and into `step_text`."""
    rate = workload.rate
    return {
        "step": step,
        "loss": report.loss,
        "learning_rate": None if rate is None else rate * rate_share(config, step - 1),
        "step_s": report.step_s,
        "rows_per_s": rows / report.step_s,
        "tokens_per_s": None if tokens is None else tokens / report.step_s,
        "bubble": report.bubble,
        "peak_bytes": list(report.peak_bytes),
        "grad_norm": report.grad_norm,
        "mfu": report.mfu,
        "tf32": report.tf32,
    }


class StepProgress(Progress):
    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        super().__init__(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,  # a log file gets no control characters
        )
        self._task = self.add_task("training", total=steps, completed=done, figures="")
        self._steps = steps

    def show(self, figures: Mapping[str, Any]) -> None:
        """figures: of a step as metrics.jsonl has them, with the latest validation loss, None before it."""
        step = figures["step"]
        if self.console.is_terminal:
            self.update(self._task, completed=step, figures=step_text(figures))
        elif step % LINE_EVERY == 0 or step in (1, self._steps):
            line = f"step {step}/{self._steps}  {step_text(figures)}"
            self.console.print(line, soft_wrap=True)


def step_text(figures: Mapping[str, Any]) -> str:
    """
    >>> speed = {"rows_per_s": 101.5, "tokens_per_s": 13e3, "bubble": 0.111, "mfu": 0.41}
    >>> step_text({"loss": 2.5, "validation_loss": None, "peak_bytes": (3 << 20, 2 << 20), **speed})
    'loss 2.5  13,000 tokens/s  MFU 41.0 %  bubble 11.1 %  memory 3.0 MiB | 2.0 MiB'
    """
    validation = figures["validation_loss"]
    shown = "" if validation is None else f"  validation {validation:.4g}"
    speed = throughput(figures["rows_per_s"], figures["tokens_per_s"])
    memory = " | ".join(map(format_bytes, figures["peak_bytes"]))
    bubble = show_share(figures["bubble"])
    mfu = "" if figures["mfu"] is None else f"  MFU {show_share(figures['mfu'])}"
    return f"loss {figures['loss']:.4g}{shown}  {speed}{mfu}  bubble {bubble}  memory {memory}"


def throughput(rows_per_s: float, tokens_per_s: float | None) -> str:
    """Tokens per second where the data are tokens, else rows; three figures of what is below 100.

    >>> throughput(101.5, 13e3), throughput(101.5, None), throughput(1.234, None)
    ('13,000 tokens/s', '102 rows/s', '1.23 rows/s')
    """
    speed, unit = (rows_per_s, "rows/s") if tokens_per_s is None else (tokens_per_s, "tokens/s")
    return f"{speed:,.0f} {unit}" if speed >= 99.5 else f"{speed:.3g} {unit}"
