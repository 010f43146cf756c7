"""Another plan in the middle of a run, by how fast its ranks really are.

    pace of a rank     seconds that it computed per step / seconds that the plan says
    gain               (1 - step of the new plan / step of today's) x measured step x steps that are left
    cost               seconds from making a pipeline to its first step, as it took before

Both steps are simulated with the times of the plan's profile, on each rank times its pace. Ranks go on with
the new plan if it gains more than it costs, and more than the noise of a machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist

from ..ir.errors import PlanError, ScheduleError
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..ir.text import show_time
from ..pipeline import Pipeline
from ..planner.plan_costs import PlanCosts, with_planned_state
from ..planning import captured_model, make_request, profile
from ..ranks import result_of_rank_0
from ..runnable import require_training
from ..step_reports import StepReport
from ..tracer.captured import Captured
from ..tracer.job import Job
from .config import Config
from .rank_processes import device_of

LATEST = 5
"""Steps whose middle one says how long ranks compute."""

STEADY = 0.1
"""Share by which the pace of a rank, against that of the others, changes without anybody planning again."""

CLEARLY = 0.05
"""Share of a step that a new plan has to gain at least."""


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """pace: of each rank, seconds that it computes for one that is planned.  now_s, other_s: the step of
    today's plan and of the new one, simulated at that pace.  plan: to go on with, None for today's."""

    pace: tuple[float, ...]
    now_s: float
    other_s: float
    gain_s: float
    cost_s: float
    plan: Plan | None

    @property
    def figures(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        told = {name: value for name, value in vars(self).items() if name != "plan"}
        return told | {"switched": self.plan is not None}

    def __str__(self) -> str:
        rank, slowest = max(enumerate(self.pace), key=lambda pair: pair[1])
        against = slowest / median(self.pace)
        text = (
            f"rank {rank} computes {against:.2f} times as long as the middle one, for its plan; planned "
            f"again, a step takes {show_time(self.other_s)} instead of {show_time(self.now_s)}; that gains "
            f"{show_time(max(0.0, self.gain_s))} by the end and costs {show_time(self.cost_s)}"
        )
        return f"{text}: {'the ranks go on with it' if self.plan else 'the plan stays'}"


class Replans:
    """Looks after every `config.replan` steps whether another plan is better. Every rank does the same, and
    rank 0 plans.

    cost_s: of going on with another plan, in seconds.
    """

    def __init__(self, pipeline: Pipeline, config: Config, *, cost_s: float) -> None:
        self._pipeline, self._config, self._cost_s = pipeline, config, cost_s
        self._latest: deque[StepReport] = deque(maxlen=LATEST)
        self.plan: Plan | None = None

    def add(self, report: StepReport) -> None:
        self._latest.append(report)

    def is_due(self, done: int) -> bool:
        return done % self._config.replan == 0 and done < self._config.steps

    def after(self, done: int) -> Replanned | None:
        """Call it after so many steps. None where the ranks keep the pace that they are planned with."""
        group = dist.group.WORLD
        assert group is not None, "ranks that train are processes of a group"
        found = result_of_rank_0(group, partial(self._plan_again, self._config.steps - done))
        self.plan = None if found is None else found.plan
        return found

    def _plan_again(self, steps_left: int) -> Replanned | None:
        pipeline = self._pipeline
        return plan_again(
            self._config,
            pipeline.job,
            pipeline.plan,
            pipeline.captured,
            busy_s=[median(each) for each in zip(*(r.busy_s for r in self._latest), strict=True)],
            step_s=median(r.step_s for r in self._latest),
            steps_left=steps_left,
            cost_s=self._cost_s,
        )


def plan_again(
    config: Config,
    job: Job,
    plan: Plan,
    captured: Captured,
    *,
    busy_s: Sequence[float],
    step_s: float,
    steps_left: int,
    cost_s: float,
) -> Replanned | None:
    """What planning again gives a run; None where its ranks keep the pace that the plan has them at.

    busy_s: seconds that each rank computes per step.  step_s: of a step.  cost_s: of going on with another
    plan. All as measured.
    """
    settings = config.pipeline
    request = make_request(job, settings, clips=settings.clips or bool(config.optimizer.clip_norm))
    device = device_of(config)
    measured = None if device == "cpu" else profile(captured, device=device, compile=settings.compile)
    cluster = None if request.local else request.cluster
    model = captured_model(
        job,
        plan.microbatch_size,
        cluster,
        captured=captured,
        profiled=measured,
        master_weights=settings.master_weights,
    )
    graph = with_planned_state(captured.graph, plan)
    planned = PlanCosts(graph, model.profiles, request.cluster).simulate(plan)
    expected = zip(busy_s, planned.totals.busy_s, strict=True)
    pace = tuple(busy / planned if planned else 1.0 for busy, planned in expected)
    if max(pace) <= min(pace) * (1 + STEADY):
        return None
    devices, profiles = [], dict[str, Profile]()
    for rank, (at, one) in enumerate(zip(pace, request.cluster.devices, strict=False)):
        devices.append(replace(one, name=f"{one.name}-{rank}"))
        alone = model.profiles[one.name]
        costs = {name: cost.scaled(at, at) for name, cost in alone.costs.items()}
        profiles[devices[-1].name] = replace(alone, costs=costs)
    paced = replace(request.cluster, devices=tuple(devices))
    now_s = PlanCosts(graph, profiles, paced).simulate(plan).step_s
    try:
        other = replace(request, cluster=paced).plan(replace(model, profiles=profiles), explained=False)
        require_training(other)
    except (PlanError, ScheduleError):  # nothing else keeps the caps
        other = replace(plan, predicted_step_s=now_s)
    gained = 1 - other.predicted_step_s / now_s
    gain_s = gained * step_s * steps_left
    return Replanned(
        pace=pace,
        now_s=now_s,
        other_s=other.predicted_step_s,
        gain_s=gain_s,
        cost_s=cost_s,
        plan=other if gained > CLEARLY and gain_s > cost_s else None,
    )
