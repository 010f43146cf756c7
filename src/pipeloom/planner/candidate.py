"""Candidate: a cut with all that a plan says of it, its step simulated. What plans are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from .. import schedules
from ..ir.memory_policy import MemoryPolicy
from ..ir.plan import Plan, StagePlan
from ..ir.stages import cut
from ..ir.timeline import Timeline
from ..ir.weight_policy import WEIGHT_POLICIES
from ..lowering import lower
from ..simulator import simulate
from .microbatch_sizes import shared_rows
from .request import Request
from .search import Evaluation, Search
from .stage_cost import stage_costs, stage_plan


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
        self.request, self.search, self.cuts = request, search, cuts
        ops = [op.name for op in search.model.wiring.ops]
        stage_of = {name: s for s, (i, j) in enumerate(pairwise(cuts)) for name in ops[i:j]}
        self.stages = cut(request.graph, stage_of)
        self.schedule = request.build(self.stages)
        self.in_flight = schedules.in_flight(self.schedule)
        evaluations = [search.evaluate(i, j, s) for s, (i, j) in enumerate(pairwise(cuts))]
        chosen = self._simulate([self._stage(s, e) for s, e in enumerate(evaluations)], evaluations)
        if self._recomputing(evaluations) > set(chosen.policy.ahead):
            chosen = min(chosen, self._recompute_ahead(evaluations), key=lambda simulated: simulated.key)
        self.policy, self.parts, self.timeline, self._estimates, self.over = chosen

    def _recomputing(self, evaluations: Sequence[Evaluation]) -> set[int]:
        """The stages that recompute something."""
        return {s for s, e in enumerate(evaluations) if "recompute" in e.treatments.values()}

    def _recompute_ahead(self, evaluations: Sequence[Evaluation]) -> _SimulatedStages:
        """With every stage that recomputes doing so ahead, where that can keep its cap: it has to free more
        for that, but what it does while its gradient is on the way costs no time."""
        other = list(evaluations)
        for stage in self._recomputing(evaluations):
            start, end = self.cuts[stage : stage + 2]
            better = self.search.ahead(start, end, stage)
            if better.fits and self._stage(stage, better)[1]:
                other[stage] = better
        return self._simulate([self._stage(s, e) for s, e in enumerate(other)], other)

    def _stage(self, stage: int, evaluation: Evaluation) -> tuple[StagePlan, bool]:
        """A stage, and whether it recomputes ahead: if it recomputes at all, and keeps its cap then."""
        model, in_flight = self.search.model, self.in_flight[stage]
        inside, ahead = (
            replace(
                stage_plan(model, self.stages, stage, in_flight, evaluation.treatments, ahead=early),
                turn_s=evaluation.seconds,
            )
            for early in (False, True)
        )
        fits = bool(inside.recomputed_bytes) and ahead.memory.total <= self.search.caps[stage]
        return (ahead if fits else inside), fits

    def _simulate(
        self, stages: Sequence[tuple[StagePlan, bool]], evaluations: Sequence[Evaluation]
    ) -> _SimulatedStages:
        """The stages with what they take, and their step."""
        model = self.search.model
        parts = tuple(part for part, _ in stages)
        treatments = tuple(e.treatments for e in evaluations) if self.search.optimises else ()
        ahead = tuple(s for s, (_, early) in enumerate(stages) if early)
        policy = MemoryPolicy(stages=treatments, ahead=ahead)
        program = lower(self.schedule, self.stages, policy=policy)
        split = program.columns.splits
        costs = stage_costs(model, self.stages, parts, treatments, ahead=ahead, split=split)
        caps = [device.memory_bytes for device in model.cluster.devices]
        timeline = simulate(program, self.stages, costs, model.cluster, caps=caps)
        over = [
            max(0, timeline.peak_bytes(rank) - caps[rank], part.memory.total - caps[rank])
            for rank, part in enumerate(parts)
        ]
        return _SimulatedStages(policy, parts, timeline, [e.peak_bytes for e in evaluations], over)

    def tighter(self) -> Search | None:
        """The search to repeat, if the schedule keeps more in flight or a cap is passed: a stage that does so
        may then take by as much less than what the search took it to need."""
        most = tuple(max(pair) for pair in zip(self.in_flight, self.search.in_flight, strict=True))
        if most == self.search.in_flight and not any(self.over):
            return None
        known = zip(self.search.caps, self._estimates, self.over, strict=True)
        left = (int(min(cap, need) - extra) if extra else cap for cap, need, extra in known)
        return replace(self.search, caps=tuple(max(1, cap) for cap in left), in_flight=most)

    def _notes(self) -> dict[str, str]:
        """Without a flush the pipeline stays full: then a step takes as long as the slowest stage."""
        if WEIGHT_POLICIES[self.request.weights].flushes:
            return {}
        steady_s = self.request.microbatches * max(part.turn_s for part in self.parts)
        return {"steady_step_s": f"{steady_s:.6g}"}

    def plan(self, strategy: str) -> Plan:
        model = self.search.model
        return Plan(
            graph=self.request.graph.fingerprint,
            planner=strategy,
            stages=self.parts,
            placement=self.schedule.placement,
            schedule=self.schedule.name,
            schedule_rows=tuple(str(self.schedule).splitlines()),
            microbatches=self.request.microbatches,
            microbatch_size=shared_rows(self.request.graph) or 1,
            batch=model.profile.batch,
            caps=tuple(device.memory_bytes for device in model.cluster.devices),
            peaks=tuple(self.timeline.peak_bytes(rank) for rank in range(self.timeline.ranks)),
            predicted_step_s=self.timeline.step_s,
            memory=self.policy,
            weights=self.request.weights,
            notes=self._notes(),
        )
