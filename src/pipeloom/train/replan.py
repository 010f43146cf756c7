"""Another plan in the middle of a run, by how fast its ranks really are.

    pace of a rank     seconds that it computed per micro-batch / seconds that the plan's profile says
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
from statistics import median, median_low
from typing import Any

import torch.distributed as dist

from ..ir.errors import PlanError, ScheduleError
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..ir.text import show_time
from ..pipeline import Pipeline
from ..plan_request import PlanRequest
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

TELLING = 0.1
"""A rank that computes for a smaller share of the time of the busiest one keeps the pace that is known."""

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
        against = slowest / median_low(self.pace)  # of two ranks, that of the other one
        text = (
            f"rank {rank} computes {against:.2f} times as long as the middle one, for its plan; planned "
            f"again, a step takes {show_time(self.other_s)} instead of {show_time(self.now_s)}; that gains "
            f"{show_time(max(0.0, self.gain_s))} by the end and costs {show_time(self.cost_s)}"
        )
        return f"{text}: {'the ranks go on with it' if self.plan else 'the plan stays'}"


class Replans:
    """Looks after every `config.replan` steps whether another plan is better. Every rank does the same, and
    rank 0 plans.

    cost_s: of going on with another plan, in seconds.  last: what was found before, of the pipeline's plan.
    """

    def __init__(self, pipeline: Pipeline, config: Config, *, cost_s: float, last: Replanned | None) -> None:
        self._pipeline, self._config, self._cost_s, self.last = pipeline, config, cost_s, last
        self._latest: deque[StepReport] = deque(maxlen=LATEST)

    def add(self, report: StepReport) -> None:
        self._latest.append(report)

    def is_due(self, done: int) -> bool:
        return done % self._config.replan == 0 and done < self._config.steps

    def after(self, done: int) -> Replanned | None:
        """Call it after so many steps. None where the ranks keep the pace that they are planned with."""
        group = dist.group.WORLD
        assert group is not None, "ranks that train are processes of a group"
        found = result_of_rank_0(group, partial(self._plan_again, self._config.steps - done))
        self.last = found or self.last
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
            known=self.last.pace if self.last is not None else (),
        )


def request_for(config: Config, plan: Plan) -> PlanRequest:
    """To plan what a run trains once more, under the caps of the plan that it has."""
    request = make_request(config.plan_settings)
    if not plan.caps:
        return request
    return replace(request, cluster=request.cluster.with_memory(plan.caps), capped=True)


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
    known: Sequence[float] = (),
) -> Replanned | None:
    """What planning again gives a run; None where its ranks keep the pace that is known.

    busy_s: seconds that each rank computes per step.  step_s: of a step.  cost_s: of going on with another
    plan. All as measured.  known: the pace of each rank, by default the same for all.
    """
    settings, request = config.pipeline, request_for(config, plan)
    device = device_of(config)
    measured = None if device == "cpu" else profile(captured, device=device, compile=settings.compile)
    cluster = None if request.local else request.cluster
    model = captured_model(
        job,
        plan.microbatch_size,
        cluster,
        captured=captured,
        profiled=measured,
        compiled=settings.compile,
        master_weights=settings.master_weights,
    )
    graph = with_planned_state(captured.graph, plan)
    planned = PlanCosts(graph, model.profiles, request.cluster).simulate(plan)
    known = known or [1.0] * len(busy_s)
    pace = tuple(
        busy / planned_s * planned.steps if planned_s and busy >= TELLING * max(busy_s) else before
        for busy, planned_s, before in zip(busy_s, planned.totals.busy_s, known, strict=True)
    )
    changes = [new / old for new, old in zip(pace, known, strict=True)]
    if max(changes) <= min(changes) * (1 + STEADY):
        return None
    paced_devices, profiles = [], dict[str, Profile]()
    for rank, (at, one) in enumerate(zip(pace, request.cluster.devices, strict=False)):
        paced_devices.append(replace(one, name=f"{one.name}-{rank}"))
        alone = model.profiles[one.name]
        costs = {name: cost.scaled(at, at) for name, cost in alone.costs.items()}
        profiles[paced_devices[-1].name] = replace(alone, costs=costs)
    paced = replace(request.cluster, devices=tuple(paced_devices))
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
