"""Rank processes that start before the run is planned. Nothing here imports torch before they have started.

A rank imports torch, the runtime and what the user's model is made of, which takes seconds. While it does,
the launching process imports the same, captures the model, profiles it and plans.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path

from ..ir.plan import load_plan
from ..ranks import build_once
from ..runtime.launch.launch import StartedRanks
from ..tracer.job_loader import load_job
from .config import Config

NEEDED = (
    "pipeloom.pipeline",
    "pipeloom.train.run",
    "torch.distributed",
    "torch.fx.experimental.proxy_tensor",
)
"""What a rank imports before its first step."""


def ranks_for(config: Config) -> AbstractContextManager[StartedRanks | None]:
    """Processes for a run's ranks; None where this process is one of several that torchrun has started.

    Raises: ConfigError if there is no plan in the file that the config names.
    """
    if "RANK" in os.environ:
        return nullcontext()
    settings = config.pipeline
    if settings.plan is None:
        return start_ranks(settings.devices, config.job)
    return start_ranks(len(set(load_plan(Path(settings.plan)).placement)), config.job)


def start_ranks(
    ranks: int, job: str | None, *, needed: bool = True
) -> AbstractContextManager[StartedRanks | None]:
    """Processes that get ready to train a job, the built-in GPT if it is None.

    needed: whether one that dies early ends this process; see `StartedRanks`.
    None for more ranks than cores: they would only take them from who plans.
    """
    if not 1 <= ranks <= (os.cpu_count() or 1):
        return nullcontext()
    return StartedRanks(ranks, prepare=get_ready, args=(job,), needed=needed)


def get_ready(job: str | None) -> None:
    """What a rank does before it knows its work: import, and build its model once on fake tensors, since the
    user's constructor imports, too."""
    for name in NEEDED:
        import_module(name)
    from .workload import default_job  # only now: it imports torch

    build_once(default_job(Config()) if job is None else load_job(job))
