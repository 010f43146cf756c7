"""Candidate: a cut with all that a plan says of it, its step simulated. What plans are compared by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from .. import schedules
from ..ir.flow import flow_of
from ..ir.memory_policy import MemoryPolicy
from ..ir.plan import Plan, StagePlan
from ..ir.stages import chain, cut
from ..ir.timeline import Timeline
from ..lowering import lower
from ..simulator import simulate
from .microbatch_sizes import shared_rows
from .request import Request
from .search import Evaluation, Search
from .stage_cost import StageEstimate, estimate_stage


class _StageChoice(NamedTuple):
    """One stage of a candidate.  ahead: whether it recomputes in front of its backward."""

    evaluation: Evaluation
    estimate: StageEstimate
    plan: StagePlan
    ahead: bool

    @property
    def recomputes(self) -> bool:
        return "recompute" in self.evaluation.treatments.values()


class _SimulatedStages(NamedTuple):
    """Stages with treatments, and their simulated step.

    estimates: bytes of each stage as the search took it.  over: by how many each rank passes its cap, in that
    step or as its stage alone says, which does not depend on when messages are taken.
    """

    policy: MemoryPolicy
    parts: tuple[StagePlan, ...]
    timeline: Timeline
    estimates: Sequence[float]
    over: Sequence[int]

    @property
    def key(self) -> tuple[int, float]:
        return sum(self.over), self.timeline.step_s


class Candidate:
    """A cut that a search proposes, as stages, schedule and simulated step."""

    def __init__(self, request: Request, search: Search, cuts: tuple[int, ...]) -> None:
        self.request, self.cuts = request, cuts
        self.notes: Mapping[str, str] = {}
        ops = [op.name for op in search.model.readers.ops]
        stage_of = {name: s for s, (i, j) in enumerate(pairwise(cuts)) for name in ops[i:j]}
        self.stages = cut(request.graph, stage_of)
        self.schedule = request.build(self.stages)
        self.updates = request.updates
        self.in_flight = schedules.in_flight(self.schedule)
        self.search = search = replace(search, in_flight=self.in_flight) if search.by_depth else search
        stages = [self._choose_ahead(s, search.evaluate(i, j, s)) for s, (i, j) in enumerate(pairwise(cuts))]
        self.fits = all(stage.evaluation.fits for stage in stages)
        chosen = self._simulate(stages)
        if any(stage.plan.recomputed_bytes and not stage.ahead for stage in stages):
            chosen = min(
                chosen, self._simulate(self._recompute_ahead(stages)), key=lambda simulated: simulated.key
            )
        self.policy, self.parts, self.timeline, self._estimates, self.over = chosen

    def _recompute_ahead(self, stages: Sequence[_StageChoice]) -> list[_StageChoice]:
        """With every stage that recomputes doing so ahead, where that can keep its cap: it has to free more
        for that, but what it does while its gradient is on the way costs no time."""
        chosen = list(stages)
        for index, stage in enumerate(stages):
            if stage.recomputes:
                start, end = self.cuts[index : index + 2]
                better = self.search.ahead(start, end, index)
                if better.fits and (other := self._choose_ahead(index, better)).ahead:
                    chosen[index] = other
        return chosen

    def _choose_ahead(self, index: int, evaluation: Evaluation) -> _StageChoice:
        """A stage, which recomputes ahead if it recomputes at all, and keeps its cap then."""
        estimate = estimate_stage(
            self.search.model.in_forward_order, self.stages, index, evaluation.treatments
        )
        inside, ahead = (
            estimate.plan(self.in_flight[index], ahead=early, turn_s=evaluation.seconds)
            for early in (False, True)
        )
        fits = bool(inside.recomputed_bytes) and ahead.memory.total <= self.search.caps[index]
        return _StageChoice(evaluation, estimate, ahead if fits else inside, fits)

    def _simulate(self, stages: Sequence[_StageChoice]) -> _SimulatedStages:
        """The stages with what they take, and their step."""
        parts = tuple(stage.plan for stage in stages)
        treatments = tuple(s.evaluation.treatments for s in stages) if self.search.optimises else ()
        ahead = tuple(index for index, stage in enumerate(stages) if stage.ahead)
        policy = MemoryPolicy(stages=treatments, ahead=ahead)
        program = lower(
            self.schedule, self.stages, policy=policy, updates=self.updates, clips=self.request.options.clips
        )
        split = program.columns.splits
        costs = tuple(s.estimate.simulator_cost(s.plan, ahead=s.ahead, split=split) for s in stages)
        cluster = self.search.model.cluster
        caps = [device.memory_bytes for device in cluster.devices]
        timeline = simulate(program, self.stages, costs, cluster, caps=caps)
        over = [
            max(0, timeline.peak_bytes(rank) - caps[rank], part.memory.total - caps[rank])
            for rank, part in enumerate(parts)
        ]
        return _SimulatedStages(policy, parts, timeline, [s.evaluation.peak_bytes for s in stages], over)

    @cached_property
    def depth(self) -> int:
        """Stages on the longest path that the schedule knows of."""
        flow = flow_of(self.stages if self.request.options.branches else chain(len(self.parts)))
        depth: dict[int, int] = {}
        for stage in reversed(flow.order):
            depth[stage] = 1 + max((depth[reader] for reader in flow.read_by[stage]), default=0)
        return max(depth.values())

    def tighter(self) -> Search | None:
        """The search to repeat, if the schedule keeps more in flight or a cap is passed: a stage that does so
        may then take by as much less than what the search took it to need."""
        most = tuple(max(pair) for pair in zip(self.in_flight, self.search.in_flight, strict=True))
        if most == self.search.in_flight and not any(self.over):
            return None
        known = zip(self.search.caps, self._estimates, self.over, strict=True)
        left = (int(min(cap, need) - extra) if extra else cap for cap, need, extra in known)
        return replace(self.search, caps=tuple(max(1, cap) for cap in left), in_flight=most)

    def plan(self, strategy: str) -> Plan:
        model = self.search.model
        return Plan(
            graph=self.request.graph.fingerprint,
            planner=strategy,
            stages=self.parts,
            placement=self.schedule.placement,
            schedule=self.schedule.name,
            schedule_rows=tuple(str(self.request.rows(self.stages)).splitlines()),
            microbatches=self.request.microbatches,
            microbatch_size=shared_rows(self.request.graph) or 1,
            batch=model.profile.batch,
            caps=tuple(device.memory_bytes for device in model.cluster.devices),
            peaks=tuple(self.timeline.peak_bytes(rank) for rank in range(self.timeline.ranks)),
            predicted_step_s=self.timeline.step_s,
            memory=self.policy,
            weights=self.request.weights,
            clips=self.request.options.clips,
            shard_optimizer=self.request.options.shard_optimizer,
            notes=self.notes,
        )
