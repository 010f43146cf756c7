"""A config that names a plan file: what the plan decides."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ir.errors import ConfigError
from ..ir.plan import Plan
from ..plan_request import COMPILED
from ..runnable import names_to_plan_by
from .config import Config
from .config_text import Override, key_of

_log = logging.getLogger("pipeloom")


def follow_plan(config: Config, plan: Plan, overrides: Sequence[Override]) -> Config:
    """A plan file decides the ranks, the replicas, the schedule, weight versions, micro-batches,
    whether replicas share the optimizer, and, if it was made for that, that stages are compiled.

    The config keeps its own planner and schedule if nothing can be planned by the plan's: a searched order is
    no schedule. A schedule of the user's own is named by the user only: a `file.py:function` of the plan,
    whose rows say all there is, does not get into the config, since what stands there is imported.

    Raises: ConfigError if one of these is also given on the command line, and differently.
    """
    fixed: dict[str, Any] = {
        "ranks": len(set(plan.placement)) // plan.width,
        "replicas": plan.width,
        "shard_optimizer": plan.shard_optimizer,
        "planner": plan.planner,
        "schedule": plan.schedule,
        "weights": plan.weights,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
    }
    if COMPILED in plan.notes:
        fixed["compile"] = True
    elif config.pipeline.compile:
        _log.warning(
            "the plan %s was made with the times and the memory of eager stages, the run compiles them; "
            "`pipeloom plan --compile` makes one for compiled stages",
            config.pipeline.plan,
        )
    if config.pipeline.chunks is not None:
        fixed["chunks"] = len(plan.stages) * plan.width // len(set(plan.placement))
    if config.pipeline.global_batch is not None:
        fixed["global_batch"] = plan.microbatches * plan.microbatch_size
    overridden = set(map(key_of, overrides))
    for key, value in fixed.items():
        setting = getattr(config.pipeline, key)
        if f"pipeline.{key}" in overridden and setting != value:
            raise ConfigError(
                f"pipeline.{key} is to be {setting}, but the plan {config.pipeline.plan} has {value}",
                hint="leave one of them out; --set pipeline.plan= does without the plan file",
            )
    for key in {"planner", "schedule"} - names_to_plan_by(plan).keys():
        del fixed[key]
    return replace(config, pipeline=replace(config.pipeline, **fixed))
