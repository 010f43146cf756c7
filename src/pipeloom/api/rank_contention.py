"""The costs of ops beside the other ranks of this machine: the same for `plan`, `bench` and `train`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..ir.errors import ConfigError
from ..ir.files import write_whole
from ..ir.graph import OpGraph
from ..ir.profile import Profile

if TYPE_CHECKING:
    from ..profiler import Contention

VARIABLE = "PIPELOOM_CONTENTION"
"""Environment: a factor for all ops instead of measured ones, such as 1."""

KEPT_S = 24 * 3600
"""A machine's other users come and go: what was measured is kept for a day."""

_log = logging.getLogger("pipeloom")


def beside_ranks(profile: Profile, graph: OpGraph, ranks: int) -> Profile:
    """A profile measured by one process of this machine's CPU, as ops take beside the other ranks.

    ranks: processes that will compute at once on this machine. A profile of another device, or one that was
    not measured, is returned as it is, and so is one of a single rank.
    """
    if ranks < 2 or profile.source != "measured" or profile.device != "cpu":
        return profile
    return contention(ranks).slowed(profile, graph)


def contention(ranks: int) -> Contention:
    """How ranks of this machine slow each other: measured once a day, and kept in the user's cache folder.

    Raises: ConfigError if the environment's factor is none.
    """
    from ..profiler import Contention, measure_contention  # only now: they import torch

    if given := os.environ.get(VARIABLE):
        try:
            return Contention(ranks=ranks, products=float(given), others=float(given))
        except ValueError as error:
            raise ConfigError(f"{VARIABLE} is {given!r}: {error}", hint="use 1 or more") from None
    path = _cache_folder() / f"{_machine()}-{ranks}.json"
    if (known := _read(path, ranks)) is not None:
        return known
    found = measure_contention(ranks)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"products": found.products, "others": found.others}) + "\n")
    except (OSError, ConfigError) as error:
        _log.debug("the contention of ranks is not remembered: %s", error)
    return found


def _read(path: Path, ranks: int) -> Contention | None:
    """What was measured before; None where nothing was, it is too old, or the file is damaged: then it is
    measured again."""
    from ..profiler import Contention

    try:
        if time.time() - path.stat().st_mtime > KEPT_S:
            return None
        figures = json.loads(path.read_text())
        return Contention(ranks=ranks, products=figures["products"], others=figures["others"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _machine() -> str:
    """A name for this machine as far as its speed goes."""
    import torch

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line for line in lines if line.startswith("model name")), platform.processor())
    parts = (platform.node(), platform.machine(), model, str(cores), torch.__version__)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipeloom" / "contention"


__all__ = ["beside_ranks", "contention"]
