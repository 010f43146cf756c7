"""What the studio opens with: schedules of the library, and what its command line names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks.schedules import check
from ..ir.errors import ConfigError, ScheduleError
from ..ir.plan import Plan, load_plan
from ..ir.stages import chain
from ..planner.branch_gain import branch_figures
from ..schedules.formats import read_schedule
from ..schedules.language.names import parse_name
from ..schedules.scenario import library
from .plans import PlanDesk, PlanModel
from .runs import run_shown
from .schedules import Reader, ScheduleDesk
from .server import Answer

if TYPE_CHECKING:
    from ..ir.cluster import Cluster
    from ..tracer.job import Job


def opened(
    what: str | None, read: Reader, *, job: Job | None = None, cluster: Cluster | None = None
) -> tuple[dict[str, Any], Mapping[str, Answer]]:
    """What the page begins with, and the answers to what it asks.

    what: a plan, a run's directory, rows of a schedule, or a schedule in the language; None for the library.
    read: see `Reader`.  job, cluster: of a plan, to simulate its changes.
    Raises: ConfigError if there is no such file, a job is given and no plan, or a cluster and no job.
    """
    if cluster is not None and job is None:
        raise ConfigError("a cluster says nothing of a plan alone", hint="name its model, too: PLAN MODEL")
    start: dict[str, Any] = {
        **{"library": library(), "entries": [{"name": "1f1b"}], "words": {}, "files": []},
        **{"plan": "", "model": False, "run": ""},
    }
    answers: dict[str, Answer] = {}
    files, times = [], None
    file = None if what is None else Path(what) if Path(what).exists() else Path(what.partition(":")[0])
    if file is not None and not file.exists():
        raise ConfigError(f"there is no {file}", hint="name a plan, a run's directory, or a schedule's file")
    if file is not None and file.is_dir():
        answers["run"], start["run"] = partial(run_shown, file), str(file)
        file = file / "plan.json" if (file / "plan.json").is_file() else None
    if file is not None and _is_json(file):
        plan, times = load_plan(file), file
        desk = PlanDesk(plan, None if job is None else PlanModel.load(job, plan, cluster))
        answers |= {name: getattr(desk, name) for name in ("plan", "save_plan", "cap", "progress")}
        start |= {
            "plan": str(file),
            "model": job is not None,
            "words": {
                "--times": str(file),  # its order is drawn by its own times; of several pipelines one
                "-p": str(len(plan.schedule_rows) // plan.width),
                "-m": str(plan.microbatches // plan.width),
            },
        }
        if _is_chain(plan):
            start["entries"] = [{"name": "plan", "rows": str(plan.as_schedule)}]
        elif parse_name(plan.schedule).family in library():
            start["entries"] = [{"name": plan.schedule}]
    elif job is not None:
        raise ConfigError(f"{what} is no plan, so a model says nothing of it", hint="leave MODEL out")
    elif file is not None and file.suffix in (".txt", ".csv"):
        start["entries"] = [{"name": file.stem, "rows": str(read_schedule(file))}]
    elif file is not None:
        files, start["entries"] = [str(what)], [{"name": str(what)}]
    schedules = ScheduleDesk(read, files=files, times=times)
    names = ("draw", "figures", "ask", "path", "recognise", "save")
    return start | {"files": files}, answers | {name: getattr(schedules, name) for name in names}


def _is_json(file: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        return file.suffix == ".json" or file.read_text(encoding="utf-8-sig").startswith("{")
    return False


def _is_chain(plan: Plan) -> bool:
    """Whether a plan's rows say all. Rows alone are read as one pipeline that drains, in which each
    stage reads the one before it."""
    if plan.steady is not None or plan.replicas > 1 or branch_figures(plan):
        return False
    with suppress(ScheduleError):
        check(plan.as_schedule, chain(len(plan.stages)))
        return True
    return False
