"""The stamp of a measurement, and the folder that bench scripts write to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
"""Not under version control: a figure that is worth keeping goes into docs/results.md with its stamp."""


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, versions, date and commit, to stand beside every figure."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str:
    """The commit that is measured, with "-dirty" behind it if tracked files differ from it; "unknown" outside
    of a git checkout."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=FOLDER, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def code_of(*_: object) -> str:
    """The commit, for scripts that name the rooms which their figures depend on."""
    return commit()


def keep(name: str, section: str, found: dict[str, Any]) -> None:
    """Write what a section of a script has found so far, beside what there is of the others."""
    save(name, {**load(name), section: {**found, "machine": describe_machine()}})


def load(name: str) -> dict[str, Any]:
    """What a script wrote to results/NAME.json before; an empty table if nothing."""
    file = RESULTS / f"{name}.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def save(name: str, table: dict[str, Any]) -> None:
    """Write a table with its stamp to results/NAME.json, at once, so that nobody reads half of it."""
    fresh = RESULTS / f"{name}.{os.getpid()}"
    fresh.write_text(json.dumps({**table, "machine": describe_machine()}, indent=1) + "\n")
    fresh.replace(RESULTS / f"{name}.json")
