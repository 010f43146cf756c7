"""What bench scripts print with their figures: the stamp of a measurement, and Markdown tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent


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
        "load": round(os.getloadavg()[0], 2),
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


def print_stamp() -> None:
    """One line, as docs/results.md wants it beside figures."""
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), flush=True)


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Rows as a Markdown table, one column per key; a table within a row becomes columns "outer inner"."""
    if not rows:
        print(f"{title or 'table'}: no rows", flush=True)
        return
    flat = [dict(_cells(row)) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    lines = [columns, ["---"] * len(columns), *([row.get(name, "-") for name in columns] for row in flat)]
    print("\n".join(["", *([title, ""] if title else []), *(f"| {' | '.join(line)} |" for line in lines)]))
    print(flush=True)


def _cells(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _cells(value, f"{before}{name} ")
        else:
            yield f"{before}{name}", _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def save(name: str, table: dict[str, Any]) -> None:
    """Write a table with its stamp to results/NAME.json."""
    file = FOLDER / "results" / f"{name}.json"
    file.write_text(json.dumps({**table, "machine": describe_machine()}, indent=1) + "\n")
