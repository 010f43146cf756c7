"""The costs of ops beside the other ranks of this machine: the same for `plan`, `bench` and `train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .ir.errors import ConfigError
from .ir.graph import OpGraph
from .ir.profile import Profile
from .kept import age_s, cache_folder, keep, machine_name

if TYPE_CHECKING:
    from .profiler.contention import Contention

VARIABLE = "PIPELOOM_CONTENTION"
"""Environment: a factor for all ops instead of measured ones, such as 1."""


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
    from .profiler.contention import Contention, measure_contention  # only now: they import torch

    if given := os.environ.get(VARIABLE):
        try:
            return Contention(ranks=ranks, products=float(given), others=float(given))
        except ValueError as error:
            raise ConfigError(f"{VARIABLE} is {given!r}: {error}", hint="use 1 or more") from None
    path = cache_folder("contention") / f"{machine_name()}-{ranks}.json"
    if (known := _read(path, ranks)) is not None:
        return known
    found = measure_contention(ranks)
    text = json.dumps({"products": found.products, "others": found.others})
    keep(path, f"{text}\n", what="the contention of ranks")
    return found


def _read(path: Path, ranks: int) -> Contention | None:
    """What was measured before; None where nothing was, it is too old, or the file is damaged: then it is
    measured again."""
    from .profiler.contention import Contention

    if age_s(path) is None:
        return None
    try:
        figures = json.loads(path.read_text())
        return Contention(ranks=ranks, products=figures["products"], others=figures["others"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
