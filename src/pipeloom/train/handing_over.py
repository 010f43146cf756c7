"""The model that a run trains, captured once, on its way to the ranks."""

from __future__ import annotations

import os

import torch

from ..ir.plan import Plan
from ..plan_request import CapturedModel
from ..ranks import HandedModel, hand_over_model, take_over_early
from ..runtime.launch.launch import StartedRanks
from ..tracer.job import Job
from ..tracer.job_loader import load_job
from .config import Config
from .workload import gpt_workload


def hand_over(
    config: Config, job: Job, plan: Plan, model: CapturedModel | None, started: StartedRanks | None
) -> HandedModel | None:
    """See `hand_over_model`; started ranks trace their stages while evaluation mode is captured.

    model: as planning has captured it, if it has.
    Raises: CaptureError as `hand_over_model`.
    """

    def early(handed: HandedModel) -> None:
        if started is not None and started.ranks == len(set(plan.placement)):
            started.prepare(get_ready_for, (config, plan, handed))

    captured = None if model is None else model.captured
    return hand_over_model(
        job, plan, captured=captured, autocast=autocast_of(config), evaluates=True, early=early
    )


def get_ready_for(config: Config, plan: Plan, model: HandedModel) -> None:
    """What a rank does before it gets the whole of its work: take over the model, and trace its stages."""
    if config.pipeline.device == "cpu":
        job = gpt_workload(config).job if config.job is None else load_job(config.job)
        take_over_early(model, job, plan, rank=int(os.environ["RANK"]), compiled=config.pipeline.compile)


def autocast_of(config: Config) -> torch.dtype | None:
    name = config.pipeline.autocast
    return None if name is None else getattr(torch, name)
