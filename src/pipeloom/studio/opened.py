"""What the studio opens with: schedules of the library, and what its command line names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..ir.errors import ConfigError
from ..schedules.formats import read_schedule
from ..schedules.scenario import library
from .schedules import Reader, ScheduleDesk
from .server import Answer


def opened(what: str | None, model: str | None, read: Reader) -> tuple[dict[str, Any], Mapping[str, Answer]]:
    """What the page begins with, and the answers to what it asks.

    what: a plan, a run's directory, rows of a schedule, or a schedule in the language; None for the library.
    model: of a plan.  read: see `Reader`.
    Raises: ConfigError if there is no such file.
    """
    start: dict[str, Any] = {"library": library(), "entries": [{"name": "1f1b"}], "words": {}, "files": []}
    desk = ScheduleDesk(read)
    if what is not None:
        file = Path(what.partition(":")[0])
        if not file.exists():
            raise ConfigError(f"there is no {file}", hint="name a plan, a run's directory, or a schedule's file")
        if file.suffix == ".py":
            desk = ScheduleDesk(read, files=[what])
            start |= {"files": [what], "entries": [{"name": what}]}
        elif file.suffix in (".txt", ".csv"):
            start["entries"] = [{"name": file.stem, "rows": str(read_schedule(file))}]
    names = ("draw", "figures", "ask", "path", "recognise", "save")
    return start, {name: getattr(desk, name) for name in names}
