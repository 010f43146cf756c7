"""What a figure was measured on: the machine, and the version of the code."""

from __future__ import annotations

import ast
import datetime
import os
import platform
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from threading import Lock

import torch

import pipeloom

WORDS = frozenset({"files.py", "plan_table.py", "what_if.py"})
"""Files of clusters and planners that read what users write and word results: no figure depends on them."""

_PARSING = Lock()
"""Python 3.11 may fail when two threads parse at a time: "AST constructor recursion depth mismatch"."""


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, versions and date, to stand beside every figure."""
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
    }


def code_of(rooms: Iterable[str], files: Iterable[Path] = ()) -> str:
    """The version of the code in these rooms of the package, with the tables that lie there, and of other
    files: a hash that comments, docstrings and `WORDS` leave as it is."""
    found = [
        file
        for room in rooms
        for file in sorted((Path(pipeloom.__file__).parent / room).rglob("*.*"))
        if file.suffix in (".py", ".toml") and file.name not in WORDS
    ]
    made = sha256()
    for file in (*found, *files):
        made.update(_statements(file) if file.suffix == ".py" else file.read_bytes())
    return made.hexdigest()[:12]


def _statements(file: Path) -> bytes:
    """What a file of Python does, without what it says."""
    with _PARSING:
        tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
