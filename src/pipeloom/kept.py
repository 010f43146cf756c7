"""What was found out about this machine or a model here, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from pathlib import Path

from .ir.errors import ConfigError
from .ir.text_files import write_whole

A_DAY_S = 24 * 3600
"""A machine's other users come and go: what was measured is kept for a day."""

_log = logging.getLogger("pipeloom")


def cache_folder(name: str) -> Path:
    """The folder for things of one kind. It need not be there."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipeloom" / name


def keep(path: Path, text: str, *, what: str) -> None:
    """Write a file of the cache folder. Where that cannot be done, the next run finds out again.

    what: is kept, for the log.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except (OSError, ConfigError) as error:
        _log.debug("%s is not kept: %s", what, error)


def age_s(path: Path) -> float | None:
    """Seconds since a file was written; None for one that is not there, or of a day or more."""
    try:
        age = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
    return age if age < A_DAY_S else None


def forget_old(folder: Path) -> None:
    """Remove what is kept there and too old to be used."""
    for path in folder.glob("*.json"):
        if age_s(path) is None:
            path.unlink(missing_ok=True)


def machine_name() -> str:
    """A name for this machine as far as its speed goes, PyTorch's version included."""
    import torch

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line for line in lines if line.startswith("model name")), platform.processor())
    parts = (platform.node(), platform.machine(), model, str(cores), torch.__version__)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
