"""How far a run has got: what that means for a run that is resumed, and what one that is broken off says."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..ir.errors import CheckpointError
from ..ranks import checkpoint_step
from .config import Config
from .run_directory import reported


def extended(config: Config, out: Path, console: Console) -> Config:
    """A finished run that is resumed without saying how far goes on for as many steps as last time.

    One that was killed before it had written its report does not: it ends as it was asked to.
    """
    done = checkpoint_step(out / "checkpoint")
    report = reported(out)
    if done < config.steps or report is None or report.steps != done:
        return config
    first = report.first_step
    console.print(
        f"{out} had done its {done} steps: it goes on to step {2 * done - first}. Another end: --steps N",
        highlight=False,
        soft_wrap=True,
    )
    return replace(config, steps=2 * done - first)


def is_finished(config: Config, out: Path, console: Console) -> bool:
    """Whether nothing is left to do, not even the report; says so.

    Raises: CheckpointError if there is nothing to resume from.
    """
    steps = checkpoint_step(out / "checkpoint")
    if steps < config.steps:
        return False
    report = reported(out)
    if report is None or report.steps != steps:
        console.print(
            f"{out} had done its {steps} steps and has no report of them: it is written now. "
            f"To train on: --resume --steps {2 * steps}",
            highlight=False,
            soft_wrap=True,
        )
        return False
    console.print(
        f"{out} is finished: {steps} of {config.steps} steps are done. "
        f"To train on: --resume, or --resume --steps {2 * steps}",
        highlight=False,
        soft_wrap=True,
    )
    return True


def end_undisturbed() -> None:
    """This process is ending, and says what it leaves: a second and a third Ctrl-C have nothing to add."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def interrupted(out: Path) -> str:
    """What a run that was broken off leaves."""
    if not out.exists():
        return f"{out} had not begun to train, and is gone"
    try:
        return (
            f"{out} is kept up to step {checkpoint_step(out / 'checkpoint')}: go on with --resume --out {out}"
        )
    except CheckpointError:
        return f"{out} has no checkpoint yet, so it cannot be resumed: remove it, or start anew elsewhere"
