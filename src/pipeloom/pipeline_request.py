"""What a script asks of a `Pipeline`: its settings sorted, and the plan that rank 0 makes from them."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, fields, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .ir.errors import ConfigError, did_you_mean
from .ir.plan import Plan
from .plan_settings import SHAPE, PlanSettings
from .planning import capture, plan_here, refuse_names
from .ranks import rank_device, result_of_rank_0
from .run_options import Options
from .runtime.channel import Channel
from .runtime.connect import connect
from .runtime.watch import Watch
from .tracer.captured import Captured
from .tracer.example import weights_digest
from .tracer.job import Job
from .tracer.job_calls import at_length

_log = logging.getLogger("pipeloom")

OF_PLAN = {one.name for one in fields(PlanSettings)}
OF_RUN = {one.name for one in fields(Options)}
CHANGE_NUMBERS = ("seed", "clip_norm", "autocast", "master_weights")


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """options: how it runs.  plan_settings: fields of `PlanSettings` that were given."""

    options: Options
    plan_settings: dict[str, Any]

    def refuse_for_plan(self) -> None:
        """Raises: ConfigError if a plan was given, and a setting that it decides."""
        if decided := sorted(self.plan_settings.keys() - OF_RUN):
            raise ConfigError(
                f"{', '.join(decided)} given beside a plan, which decides that",
                hint="leave it out, or leave the plan out to have one made",
            )

    def longest(self, job: Job) -> Job:
        """A job with batches of the longest of the lengths that are planned for, if there are several."""
        histogram = PlanSettings(lengths=self.plan_settings.get("lengths")).histogram
        return at_length(job, max(histogram)) if histogram else job

    def settings(self, *, ranks: int, rows: int | None) -> PlanSettings:
        """Of the plan that is to be made for so many ranks.

        rows: of a batch; None if micro-batches are as `PlanSettings` has them.
        """
        PlanSettings(**self.plan_settings)  # refuses a number that cannot be, before it is reckoned with
        of_both = {name: getattr(self.options, name) for name in OF_PLAN & OF_RUN}
        of_both["clips"] = self.options.clip_norm is not None
        given: dict[str, Any] = of_both | self.plan_settings
        replicas = given.get("replicas", 1)
        given.setdefault("ranks", max(1, ranks // replicas))
        if given["ranks"] * replicas != ranks:
            raise ConfigError(
                f"{given['ranks']} ranks with {replicas} replicas are asked for, {ranks} were started",
                hint="start as many processes, or leave ranks out",
            )
        if rows is None or "global_batch" in given:
            return PlanSettings(**given)
        count, size = given.get("microbatches"), given.get("microbatch_size")
        if count is None:
            # Replicas share them evenly.
            most = min(PlanSettings().microbatches, rows)
            each = -(-rows // (size * replicas)) if size else most // replicas
            count = max(1, each) * replicas
        if rows < count:
            raise ConfigError(
                f"{count} micro-batches are asked for and the example has {rows} rows",
                hint="give larger batches, or ask for fewer micro-batches",
            )
        given |= {"microbatches": count, "microbatch_size": size or -(-rows // count)}
        return PlanSettings(**given)


def pipeline_settings(options: Options, given: dict[str, Any]) -> PipelineRequest:
    """Sort the keywords of a `Pipeline` into those of its plan and those of its run; some are of both.

    Raises: ConfigError for one that is of neither.
    """
    for name in given:
        if name not in OF_PLAN | OF_RUN:
            raise ConfigError(
                f"there is no setting {name} of a pipeline",
                hint=did_you_mean(name, OF_PLAN | OF_RUN, "see PlanSettings and Options"),
            )
    said = {name for name, value in given.items() if value is not None}
    none = {one.name for one in fields(Options) if one.default is None}
    run = {name: given[name] for name in given if name in OF_RUN & (said | none)}
    plan = {name: given[name] for name in given if name in OF_PLAN & said}
    return PipelineRequest(options=replace(options, **run) if run else options, plan_settings=plan)


def refuse_parts_of_job(**parts: object) -> None:
    """Raises: ConfigError if any of them is given beside a job, which has them."""
    if given := [name for name, part in parts.items() if part is not None]:
        raise ConfigError(
            f"{', '.join(given)} given beside a Job, which has that",
            hint="give it to the Job, or the model itself in the place of the Job",
        )


def plan_on_rank_0(
    job: Job,
    asked: PipelineRequest,
    *,
    rows: int | None,
    group: dist.ProcessGroup | DeviceMesh | None,
    channel: Channel | None,
) -> tuple[Plan, Captured]:
    """The plan that rank 0 makes, for all ranks; and the model that each has captured for it, all at once.

    rows: of a batch, if the job was made from one.
    """
    if channel is not None and channel.ranks > 1:
        raise ConfigError("ranks that are threads have no plan", hint="make one with pipeloom.plan")
    options, device, ranks = asked.options, rank_device(asked.options), None
    if group is not None or dist.is_initialized() or "RANK" in os.environ:
        ranks = connect(device, group=group, timeout_s=options.timeout_s)
    count = 1 if ranks is None else ranks.size()
    settings = asked.settings(ranks=count, rows=rows)
    refuse_names(settings)
    captured = capture(job, settings.microbatch_size, autocast=options.autocast, device=device.type)

    def make() -> Plan:
        _log.info("planning %s for %d ranks", job.name, count)
        any_width = not asked.plan_settings.keys() & set(SHAPE)
        plan = plan_here(job, settings, captured, device=device.type, any_width=any_width)
        stages, step_ms = len(plan.stages), 1e3 * plan.predicted_step_s
        _log.info("planned: %d stages, %s, %.1f ms a step predicted", stages, plan.schedule, step_ms)
        return plan

    return make() if ranks is None else result_of_rank_0(ranks, make), captured


def require_same_settings(watch: Watch, asked: PipelineRequest, rows: int | None) -> None:
    """Refuse, on all ranks, to start with settings of a plan, or of a run those that change its numbers, that
    are not the same on each. rows: of the example."""
    given = asked.plan_settings | {name: getattr(asked.options, name) for name in CHANGE_NUMBERS}
    mine = {name: str(value) for name, value in given.items() if name != "offload_dir"}
    words = watch.gather(json.dumps(mine | {"rows of the example": str(rows)}), asked.options.timeout_s)
    first, *others = map(json.loads, words)
    for rank, theirs in enumerate(others, start=1):
        for name in first | theirs:
            if first.get(name) != theirs.get(name):
                raise ConfigError(
                    f"rank {rank} was given {theirs.get(name)} for {name}, and rank 0 {first.get(name)}",
                    hint="give all ranks the same settings",
                )


def require_same_weights(watch: Watch, module: nn.Module, timeout_s: float) -> None:
    """Refuse, on all ranks, to start with a module whose weights each rank has drawn otherwise."""
    for rank, digest in enumerate(digests := watch.gather(repr(weights_digest(module)), timeout_s)):
        if digest != digests[0]:
            raise ConfigError(
                f"the module of rank {rank} has other weights than that of rank 0",
                hint="call torch.manual_seed before it is made, on every rank alike; or give what makes it, "
                "as lambda: Net(config), which is then called with the pipeline's seed",
            )
