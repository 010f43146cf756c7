"""Progress of training for people: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..ir.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One step's figures. peak_bytes: per rank. tokens_per_s: None for data of another kind.
    validation_loss: the latest, None before the first."""

    step: int
    loss: float
    rows_per_s: float
    tokens_per_s: float | None
    bubble: float
    peak_bytes: tuple[int, ...]
    validation_loss: float | None = None

    def __str__(self) -> str:
        """
        >>> peaks = (3 << 20, 2 << 20)
        >>> speed = {"rows_per_s": 101.5, "tokens_per_s": 13e3}
        >>> print(StepFigures(step=7, loss=2.5, bubble=0.111, peak_bytes=peaks, **speed))
        loss 2.500  13,000 tokens/s  bubble 11.1 %  memory 3.0 MiB | 2.0 MiB
        """
        validation = "" if self.validation_loss is None else f"  validation {self.validation_loss:.3f}"
        memory = " | ".join(format_bytes(size) for size in self.peak_bytes)
        return (
            f"loss {self.loss:.3f}{validation}  {throughput(self.rows_per_s, self.tokens_per_s)}  "
            f"bubble {self.bubble:.1%}  memory {memory}".replace("%", " %")
        )


def throughput(rows_per_s: float, tokens_per_s: float | None) -> str:
    """Tokens per second where the data are tokens, else rows; three figures of what is below 100.

    >>> throughput(101.5, 13e3), throughput(101.5, None), throughput(1.234, None)
    ('13,000 tokens/s', '102 rows/s', '1.23 rows/s')
    """
    speed, unit = (rows_per_s, "rows/s") if tokens_per_s is None else (tokens_per_s, "tokens/s")
    return f"{speed:,.0f} {unit}" if speed >= 99.5 else f"{speed:.3g} {unit}"


class Display(Protocol):
    """Shows steps as they end; a context manager around the training loop."""

    def show(self, figures: StepFigures) -> None: ...

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SilentDisplay:
    """For ranks other than 0, and for `--json`."""

    def show(self, figures: StepFigures) -> None:
        pass

    def __enter__(self) -> SilentDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LineDisplay(SilentDisplay):
    """A line every few steps, without control characters: for log files."""

    def __init__(self, console: Console, *, steps: int, every: int = 10) -> None:
        self.console, self.steps, self.every = console, steps, every

    def show(self, figures: StepFigures) -> None:
        if figures.step % self.every == 0 or figures.step in (1, self.steps):
            line = f"step {figures.step}/{self.steps}  {figures}"
            self.console.print(line, highlight=False, soft_wrap=True)


class BarDisplay(SilentDisplay):
    """One live line."""

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self.task = self.progress.add_task("training", total=steps, completed=done, figures="")

    def show(self, figures: StepFigures) -> None:
        self.progress.update(self.task, completed=figures.step, figures=str(figures))

    def __enter__(self) -> BarDisplay:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()


def display_for(console: Console, *, rank: int, steps: int, done: int) -> Display:
    """What suits this rank and this output."""
    if rank != 0 or console.quiet:
        return SilentDisplay()
    if console.is_terminal:
        return BarDisplay(console, steps=steps, done=done)
    return LineDisplay(console, steps=steps)
