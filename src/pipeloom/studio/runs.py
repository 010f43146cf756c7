"""A run's directory on the page, also while it trains: losses, and the predicted over the measured step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..ir.errors import ConfigError
from ..ir.text import load_noun, show_share, show_time
from ..ir.timeline import Timeline
from ..train.run_directory import METRICS, TIMELINES, is_locked, read_metrics
from ..viewer.picture import memory_panels, pictures


def run_shown(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What is there by now. going: a process trains in the directory; its step is drawn when it has ended."""
    lines = read_metrics(folder / METRICS)
    losses = {
        "train": [(line.step, line.loss) for line in lines if line.loss is not None],
        "validation": [
            (line.step, line.validation_loss) for line in lines if line.validation_loss is not None
        ],
    }
    steps_s = [line.step_s for line in lines if line.step_s is not None]
    file = folder / TIMELINES
    going = is_locked(folder)
    last = max((line.step for line in lines), default=0)
    said = f"{'training, step' if going else 'ended at step'} {last}"
    timelines: list[Timeline] = []
    if not going and file.is_file():
        try:
            timelines = load_noun(file, list[Timeline])
        except ConfigError as error:
            said += f"; {error.message}"
    elif not going:
        said += f"; no {TIMELINES} to draw"
    if steps_s:
        said += f"; the last step took {show_time(steps_s[-1])}"
    for timeline in timelines:
        said += f"; {timeline.source} {show_time(timeline.step_s)}, bubble {show_share(timeline.bubble)}"
    return {
        "going": going,
        "said": said,
        "losses": [{"name": name, "points": points} for name, points in losses.items() if points],
        "pictures": pictures(timelines),
        "memory": memory_panels(timelines),
    }
