"""Candidate: a cut with all that a plan says of it, its step simulated. What plans are compared by."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ..ir.columns import OFFLOAD_
from ..ir.costs import StageCost
from ..ir.errors import ScheduleError
from ..ir.flow import flow_of
from ..ir.memory_policy import MemoryPolicy, Treatment
from ..ir.plan import Plan, StagePlan
from ..ir.schedule import Schedule
from ..ir.stages import chain, sequential
from ..ir.steady import SteadyStep
from ..ir.timeline import Timeline
from ..lowering.passes import lower
from ..schedules import registry
from ..schedules.language.names import parse_name
from ..simulator.simulate import simulate
from .microbatch_sizes import shared_rows
from .placement import residual_room
from .plan_costs import count_once
from .refusals import host_shortage
from .request import Request, SimulatedStep, remembered, unrolled
from .search.cut_search import Search
from .stage_cost.stage_estimate import StageEstimate, cost_stage, estimate_stage, offload_all
from .treatments.choose import Evaluation

EQUAL_TIMES = "order_for_equal_times"
"""Note of a plan whose stages run in the order for equal times, though its schedule orders by time."""


MOST_REMEMBERED = 4000
"""Micro-batches times stages of a step up to which it is remembered: larger ones would fill memory."""


class _StageChoice(NamedTuple):
    """One stage of a candidate.  ahead: whether it recomputes in front of its backward."""

    evaluation: Evaluation
    estimate: StageEstimate
    plan: StagePlan
    ahead: bool


class _SimulatedStages(NamedTuple):
    """Stages with treatments, and their simulated step.

    costs: of each stage, replicas included.  estimates: bytes of each stage as the search took it.
    over: by how many each rank passes its cap, in that step or as its stage alone says, which does not depend
    on when messages are taken.
    """

    policy: MemoryPolicy
    parts: tuple[StagePlan, ...]
    timeline: Timeline
    costs: tuple[StageCost, ...]
    estimates: Sequence[float]
    over: Sequence[int]

    @property
    def key(self) -> tuple[int, float]:
        return sum(self.over), self.timeline.step_s


class Room(NamedTuple):
    """Of a schedule that copies until caps are kept. room: bytes of each rank for residuals; None for what
    its cap leaves beside parameters and scratch.  treated: stages that may leave, and make cheap residuals
    again; None for all."""

    room: tuple[float, ...] | None = None
    treated: frozenset[int] | None = None


class Candidate:
    """A cut that a search proposes, as stages, schedule and simulated step."""

    def __init__(
        self, request: Request, search: Search, cuts: tuple[int, ...], room: Room | None = None
    ) -> None:
        """room: of a schedule that fits the caps, see `fit_caps`."""
        self.request, self.cuts, self._asked = request, cuts, room or Room()
        self.notes: Mapping[str, str] = {}
        self.layout = request.layout
        self.stages = request.shared.cut(request.graph, search.model.readers, cuts, self.layout.replicas)
        self.search, self.in_flight = search, search.in_flight
        self._known_estimates: dict[Hashable, StageEstimate] = {}
        self.room: tuple[float, ...] | None = None
        self.rows = self._order()
        self.schedule = unrolled(self.rows)
        self.updates = request.updates
        held = registry.in_flight(self.schedule)
        self.in_flight = tuple(max(held[s :: self.layout.stages]) for s in range(self.layout.stages))
        self.search = search = replace(search, in_flight=self.in_flight) if search.by_depth else search
        columns = self.schedule.columns
        leaving = columns.stage[columns.kind == OFFLOAD_] % self.layout.stages
        self.leaving = frozenset(leaving.tolist())
        found = self._evaluations(self.leaving, self.treated if request.fits_caps else ())
        self.fits = all(evaluation.fits for evaluation in found)
        stages = [self._choose_ahead(s, evaluation) for s, evaluation in enumerate(found)]
        tries = [self._simulate(stages)]
        if any(stage.plan.recomputed_bytes and not stage.ahead for stage in stages):
            tries.append(self._simulate(self._recompute_ahead(stages)))
        if not self.layout.in_line and any(tries[0].over) and any(stage.ahead for stage in stages):
            inside = [self._choose_ahead(s, evaluation, may=False) for s, evaluation in enumerate(found)]
            tries.append(self._simulate(inside))
        chosen = min(tries, key=lambda simulated: simulated.key)
        self.policy, self.parts, self.timeline, self.stage_costs, self._estimates, self.over = chosen
        on_hosts = [self.timeline.peak_bytes(rank, "host") for rank in range(self.timeline.ranks)]
        self.host_shortage = host_shortage(on_hosts, request.cluster)

    def _order(self) -> Schedule | SteadyStep:
        """The rows. Not every order by time of the library repeats, as a pipeline without a flush needs it,
        or runs to its end under the schedule's limits; a cut for which it does not gets the order for equal
        times. That of a user's file is refused."""
        try:
            return self._order_by_time()
        except ScheduleError:
            if not self._by_time or parse_name(self.request.schedule).in_file:
                raise
            self.notes = {EQUAL_TIMES: ""}
            return self.request.usual_rows

    @property
    def _by_time(self) -> bool:
        return self.request.entry.recipe is not None or self.request.copies

    def _order_by_time(self) -> Schedule | SteadyStep:
        """The rows; for schedules that order by time, for what the search takes the stages to need."""
        if not self._by_time:
            return self.request.rows(self.stages)
        fits = self.request.fits_caps
        found = self._evaluations(self.treated if fits else range(self.layout.stages))
        stages = [self._choose_ahead(s, evaluation) for s, evaluation in enumerate(found)]
        costs = self._costs(stages, split=False)
        if fits:
            self.room = self._asked.room or residual_room(costs, self.layout.placement, self.request.cluster)
        return self.request.rows(self.stages, costs, room=self.room)

    @property
    def keeps_caps(self) -> bool:
        """Whether it keeps those of devices, and what hosts have, in its simulated step."""
        return self.tighter() is None and self.host_shortage is None

    @property
    def treated(self) -> frozenset[int]:
        """Stages of which something may leave where the schedule fits the caps."""
        asked = self._asked.treated
        return frozenset(range(self.layout.stages)) if asked is None else asked

    def _evaluations(self, leaving: Collection[int], treated: Collection[int] = ()) -> list[Evaluation]:
        """Of the stages by the search; where the schedule itself has copies, with all that is to leave.

        leaving: stages of which some micro-batch has copies.  treated: stages that make cheap residuals again
        even if none has.
        """
        found = [self.search.evaluate(i, j, s) for s, (i, j) in enumerate(pairwise(self.cuts))]
        if not self.request.copies:
            return found
        return [
            replace(one, treatments=self._treatments(s, leaves=s in leaving, treated=s in treated))
            for s, one in enumerate(found)
        ]

    def _treatments(self, stage: int, *, leaves: bool, treated: bool) -> dict[str, Treatment]:
        """Of a stage of a schedule that has copies itself."""
        if not (leaves or treated):
            return {}
        model, again = self.search.model.in_forward_order, self.request.makes_again
        chosen = offload_all(model, self.stages, stage, again=again)
        return {name: how for name, how in chosen.items() if leaves or how != "offload"}

    def _costs(self, stages: Sequence[_StageChoice], *, split: bool) -> tuple[StageCost, ...]:
        own = tuple(s.estimate.simulator_cost(s.plan, ahead=s.ahead, split=split) for s in stages)
        if self.layout.in_line:
            return own
        costs, options = list(own), self.request.options
        first, *others = self.request.models
        for model in others:
            if model is first:
                costs += own
                continue
            for s, stage in enumerate(stages):
                how, held = stage.evaluation.treatments, self.in_flight[s]
                forward = model.in_forward_order
                costs.append(cost_stage(forward, self.stages, s, how, held, ahead=stage.ahead, split=split))
        return count_once(
            costs,
            self.stages,
            self.request.graph,
            placement=self.layout.placement,
            shared_out=self.request.cluster if options.shard_optimizer and self.layout.replicas > 1 else None,
            sharing=options.sharing,
        )

    def _recompute_ahead(self, stages: Sequence[_StageChoice]) -> list[_StageChoice]:
        """With every stage that recomputes doing so ahead, where that can keep its cap: it has to free more
        for that, but what it does while its gradient is on the way costs no time."""
        chosen = list(stages)
        for index, stage in enumerate(stages):
            if "recompute" in stage.evaluation.treatments.values():
                start, end = self.cuts[index : index + 2]
                better = self.search.ahead(start, end, index)
                if better.fits and (other := self._choose_ahead(index, better)).ahead:
                    chosen[index] = other
        return chosen

    def _choose_ahead(self, index: int, evaluation: Evaluation, *, may: bool = True) -> _StageChoice:
        """A stage, which recomputes ahead if it may and recomputes at all, and keeps its cap then."""
        model = self.search.model.in_forward_order
        how = index, frozenset(evaluation.treatments.items())
        estimate = remembered(
            self._known_estimates,
            how,
            lambda: estimate_stage(model, self.stages, index, evaluation.treatments),
        )
        # What does not fit by itself may keep the caps with all other stages.
        turn_s = evaluation.seconds if evaluation.fits else estimate.turn_s
        inside = estimate.plan(self.in_flight[index], turn_s=turn_s)
        if may and inside.recomputed_bytes:
            ahead = estimate.plan(self.in_flight[index], ahead=True, turn_s=turn_s)
            if ahead.memory.total <= self.search.caps[index]:
                return _StageChoice(evaluation, estimate, ahead, ahead=True)
        return _StageChoice(evaluation, estimate, inside, ahead=False)

    def _simulate(self, stages: Sequence[_StageChoice]) -> _SimulatedStages:
        parts = tuple(stage.plan for stage in stages)
        treatments = (
            tuple(s.evaluation.treatments for s in stages)
            if self.search.optimises or self.request.copies
            else ()
        )
        ahead = tuple(index for index, stage in enumerate(stages) if stage.ahead)
        at_once = self.request.options.offloaded_at_once
        policy = MemoryPolicy(stages=treatments, ahead=ahead, at_once=at_once)
        cluster, clips = self.request.cluster, self.request.options.clips
        caps = [device.memory_bytes for device in cluster.devices]

        def step() -> SimulatedStep:
            program = lower(self.schedule, self.stages, policy=policy, updates=self.updates, clips=clips)
            costs = self._costs(stages, split=program.columns.splits)
            return SimulatedStep(self.rows, costs, simulate(program, self.stages, costs, cluster, caps=caps))

        if self._by_time or self.request.microbatches * len(stages) > MOST_REMEMBERED:
            _, costs, timeline = step()
        else:  # the same rows for many cuts, and the same cut from many searches
            each = tuple(tuple(sorted(s.evaluation.treatments.items())) for s in stages)
            order = self.search.model.readers.order
            key = (id(self.rows), order, self.cuts, each, policy.ahead, at_once, tuple(caps), clips)
            _, costs, timeline = remembered(self.request.shared.steps, key, step)
        over = [max(0, timeline.peak_bytes(rank) - cap) for rank, cap in enumerate(caps)]
        if self.layout.in_line and not self.request.copies:
            alone = zip(over, parts, caps, strict=True)
            over = [max(extra, part.memory.total - cap) for extra, part, cap in alone]
        estimates = [stage.evaluation.peak_bytes for stage in stages]
        return _SimulatedStages(policy, parts, timeline, costs, estimates, over)

    def sequential_step_s(self) -> float:
        """Seconds of the step as a sequential pipeline, in which values are handed on from stage to stage: a
        stage also waits for the one in front of it, and for the gradient of the one behind it, of which it
        reads nothing (GraphPipe, section 2)."""
        stages = sequential(self.stages)
        clips, cluster = self.request.options.clips, self.request.cluster
        program = lower(self.schedule, stages, policy=self.policy, updates=self.updates, clips=clips)
        return simulate(program, stages, self.stage_costs, cluster).step_s

    @cached_property
    def depth(self) -> int:
        """Stages on the longest path that the schedule knows of."""
        flow = flow_of(self.stages if self.request.options.branches else chain(len(self.parts)))
        depth: dict[int, int] = {}
        for stage in reversed(flow.order):
            depth[stage] = 1 + max((depth[reader] for reader in flow.read_by[stage]), default=0)
        return max(depth.values())

    def tighter(self) -> Search | None:
        """The search to repeat, if a cap is passed, or a stage alone on its rank keeps more in flight: a
        stage may then take by as much less than what the search took it to need.

        Of several stages on a rank each gives up its part of what is too much, and gets its part of what is
        left: together they may then take what the rank has, by the difference that there is between the sum
        of their estimates, each at its own worst moment, and the rank's simulated peak.
        """
        if not self.layout.in_line or self.request.copies:
            return replace(self.search, caps=self._parts_of_caps()) if any(self.over) else None
        most = tuple(max(pair) for pair in zip(self.in_flight, self.search.in_flight, strict=True))
        if most == self.search.in_flight and not any(self.over):
            return None
        known = zip(self.search.caps, self._estimates, self.over, strict=True)
        left = (int(min(cap, need) - extra) if extra else cap for cap, need, extra in known)
        return replace(self.search, caps=tuple(max(1, cap) for cap in left), in_flight=most)

    def _parts_of_caps(self) -> tuple[int, ...]:
        """What each stage may take, of its rank's cap. Its part of what is too much, or left, is as large as
        its share of the residuals there, if these may be freed, and else of all bytes."""
        devices = self.request.cluster.devices
        sizes = [part.memory.residuals if self.search.optimises else part.memory.total for part in self.parts]
        caps = [float(devices[self.layout.placement[stage]].memory_bytes) for stage in range(len(sizes))]
        for rank, held in enumerate(self.layout.held):
            extra = self.timeline.peak_bytes(rank) - devices[rank].memory_bytes
            together = sum(sizes[stage] for stage in held)
            for stage in held:
                part = sizes[stage] / together if together else 1 / len(held)
                caps[stage] = min(caps[stage], self._estimates[stage] - extra * part)
        return tuple(max(1, int(cap)) for cap in caps)

    def plan(self) -> Plan:
        model = self.search.model
        return Plan(
            graph=self.request.graph.fingerprint,
            planner=self.request.options.planner,
            stages=self.parts,
            placement=self.schedule.placement,
            schedule=self.rows.name,
            schedule_rows=tuple(str(self.rows).splitlines()),
            microbatches=self.request.microbatches,
            microbatch_size=shared_rows(self.request.graph) or 1,
            batch=model.profile.batch,
            caps=tuple(device.memory_bytes for device in self.request.cluster.devices),
            peaks=self.timeline.rank_peaks,
            predicted_step_s=self.timeline.step_s,
            memory=self.policy,
            weights=self.request.weights,
            delay_correction=self.request.options.delay_correction,
            warm_up_with_flush=self.request.options.warm_up_with_flush,
            clips=self.request.options.clips,
            master_weights=self.request.options.master_weights,
            shard_optimizer=self.request.options.shard_optimizer,
            notes=self.notes,
        )


def step_s(candidate: Candidate) -> float:
    """Seconds of its simulated step: what candidates are compared by."""
    return candidate.timeline.step_s
