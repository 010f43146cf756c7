"""make_plan: OpGraph x Profile x Cluster -> Plan, by any planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import NamedTuple

from .. import schedules
from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError, PlanError
from ..ir.graph import OpGraph
from ..ir.memory import MemoryPolicy, Treatment
from ..ir.plan import Plan, StagePlan
from ..ir.profile import Profile
from ..ir.stages import cut
from ..ir.timeline import Timeline
from ..lowering import lower
from ..simulator import simulate
from .batches import shared_rows
from .evaluation import Evaluation
from .infeasible import does_not_fit, explain_infeasible, needs, passes_caps, scaled
from .registry import Planner, planner
from .request import PlanOptions, Request
from .search import Search
from .stagecosts import stage_costs, stage_plan

ROUNDS = 5
"""Searches until the schedule and the simulated peaks of the found cut agree with what was searched with; of
large graphs all that are made."""

LOWERED = (0.95, 0.9, 0.8, 0.7)
"""Shares of all caps that are searched with where that does not come to an end."""


def make_plan(
    graph: OpGraph, profile: Profile | Mapping[str, Profile], cluster: Cluster, *,
    stages: int, schedule: str, microbatches: int, strategy: str = "exact",
    options: PlanOptions = PlanOptions(),  # noqa: B008  frozen
    explained: bool = True, largest: Callable[[], int | None] | None = None,
    watch: Callable[[int], None] | None = None,
) -> Plan:  # fmt: skip
    """Cut a graph into stages, stage s on device s.

    profile: costs per micro-batch, for all devices or by device name.
    schedule: see `schedules.names`.  microbatches: per step.  strategy: see `planner.names`.
    explained: if nothing fits, look for what would, which takes longer.  largest: asked for the largest
        micro-batch size with a plan, if there is none for this one.
    watch: told how many stages were weighed so far.
    Raises: PlanError if the request makes no sense; InfeasibleError if nothing fits under the devices'
        memory, with what would.
    """
    _refuse_nonsense(graph, cluster, stages)
    known = planner(strategy)
    used = replace(cluster, devices=cluster.devices[:stages])
    request = Request(graph, profile, used, schedule, microbatches, options, known, watch)
    request.refuse_what_cannot_be()
    search = request.search(stages)
    if stages > (places := len(search.model.cut_points) - 1):
        raise PlanError(
            f"{stages} stages, but ops that share an updated buffer stay together, which leaves {places}",
            hint=f"use at most {places} stages",
        )
    cuts = known.find(search)
    if cuts and not known.keeps_caps and _over(search, cuts):
        raise does_not_fit(search, cuts, strategy)
    if not cuts:
        if explained:
            raise explain_infeasible(search, request.wider, largest, advice=request.advice)
        raise InfeasibleError(f"no cut into {stages} stages fits", hint="use smaller micro-batches")
    tried: list[_Found] = []
    most = ROUNDS if search.large else None
    for found in islice(_candidates(_Found(request, search, cuts), known), most):
        tried.append(found)
        if found.tighter() is None:
            return found.plan(strategy)
    raise passes_caps(
        min((found.timeline for found in tried), key=lambda step: _excess(step, used)), used, schedule,
        largest if explained else None,
    )  # fmt: skip


def _candidates(first: _Found, known: Planner) -> Iterator[_Found]:
    """Cuts to simulate until one keeps its caps there, as the model of a stage has estimated: first with the
    caps of the ranks that passed theirs lowered by that; then with all caps lowered alike, as far as a cut is
    found; then with fewer ways to free memory, whose estimates are simpler."""
    request, search = first.request, first.search
    yield first
    for treatments in _fewer(search.treatments):
        most = tuple(map(max, first.in_flight, search.in_flight))
        own = replace(search, treatments=treatments, in_flight=most)
        found = first if treatments == search.treatments else _found(request, own, known)
        for _ in range(ROUNDS):
            if found is None:
                break
            yield found
            tighter = found.tighter()
            assert tighter is not None, "whoever asks for the next one has seen this one pass a cap"
            found = _found(request, tighter, known)
        for share in LOWERED:
            if found := _found(request, scaled(own, share), known):
                yield found


def _found(request: Request, search: Search, known: Planner) -> _Found | None:
    cuts = known.find(search)
    if not cuts or (not known.keeps_caps and _over(search, cuts)):
        return None
    return _Found(request, search, cuts)


def _fewer(treatments: tuple[Treatment, ...]) -> list[tuple[Treatment, ...]]:
    """All of them, without offloading, and none."""
    without = tuple(t for t in treatments if t != "offload")
    return list(dict.fromkeys((treatments, without, ())))


def _excess(step: Timeline, cluster: Cluster) -> int:
    """Bytes by which all ranks together pass their caps."""
    return sum(max(0, step.peak_bytes(rank) - d.memory_bytes) for rank, d in enumerate(cluster.devices))


def _over(search: Search, cuts: tuple[int, ...]) -> bool:
    """Whether a stage of a cut holds more than its cap."""
    return any(need > cap for need, cap in zip(needs(search, cuts), search.caps, strict=True))


class _Costed(NamedTuple):
    """Stages with treatments, and their simulated step; by how many bytes each rank passes its cap."""

    policy: MemoryPolicy
    parts: tuple[StagePlan, ...]
    timeline: Timeline
    over: Sequence[int]

    @property
    def key(self) -> tuple[int, float]:
        return sum(self.over), self.timeline.step_s


class _Found:
    """A cut that the search calls good, as stages, schedule and simulated step."""

    def __init__(self, request: Request, search: Search, cuts: tuple[int, ...]) -> None:
        self.request, self.search, self.cuts = request, search, cuts
        ops = [op.name for op in search.model.wiring.ops]
        stage_of = {name: s for s, (i, j) in enumerate(pairwise(cuts)) for name in ops[i:j]}
        self.stages = cut(request.graph, stage_of)
        self.schedule = request.build(self.stages)
        self.in_flight = schedules.in_flight(self.schedule)
        found = [search.evaluate(i, j, s) for s, (i, j) in enumerate(pairwise(cuts))]
        chosen = self._costed([self._stage(s, e) for s, e in enumerate(found)], found)
        if self._again(found) > set(chosen.policy.ahead):
            chosen = min(chosen, self._all_ahead(found), key=lambda costed: costed.key)
        self.policy, self.parts, self.timeline, self.over = chosen

    def _again(self, found: Sequence[Evaluation]) -> set[int]:
        """The stages that recompute something."""
        return {s for s, e in enumerate(found) if "recompute" in e.treatments.values()}

    def _all_ahead(self, found: Sequence[Evaluation]) -> _Costed:
        """With every stage that recomputes doing so ahead, where that can keep its cap: it has to free more
        for that, but what it does while its gradient is on the way costs no time."""
        other, freeing = list(found), self.search.freeing(ahead=True)
        for stage in self._again(found):
            start, end = self.cuts[stage : stage + 2]
            better = freeing(start, end, stage)
            if better.fits and self._stage(stage, better)[1]:
                other[stage] = better
        return self._costed([self._stage(s, e) for s, e in enumerate(other)], other)

    def _stage(self, stage: int, found: Evaluation) -> tuple[StagePlan, bool]:
        """A stage, and whether it recomputes ahead: if it recomputes at all, and keeps its cap then."""
        model, in_flight = self.search.model, self.in_flight[stage]
        inside, ahead = (
            replace(
                stage_plan(model, self.stages, stage, in_flight, found.treatments, ahead=early),
                turn_s=found.seconds,
            )
            for early in (False, True)
        )
        fits = bool(inside.recomputed_bytes) and ahead.memory.total <= self.search.caps[stage]
        return (ahead if fits else inside), fits

    def _costed(self, stages: Sequence[tuple[StagePlan, bool]], found: Sequence[Evaluation]) -> _Costed:
        """The stages with what they take, and their step."""
        model = self.search.model
        parts = tuple(part for part, _ in stages)
        treatments = tuple(e.treatments for e in found) if self.search.optimises else ()
        ahead = tuple(s for s, (_, early) in enumerate(stages) if early)
        policy = MemoryPolicy(stages=treatments, ahead=ahead)
        costs = stage_costs(model, self.stages, parts, treatments, ahead=ahead)
        program = lower(self.schedule, self.stages, policy=policy)
        caps = [device.memory_bytes for device in model.cluster.devices]
        timeline = simulate(program, self.stages, costs, model.cluster, caps=caps)
        over = [
            max(0, timeline.peak_bytes(rank) - device.memory_bytes)
            for rank, device in enumerate(model.cluster.devices)
        ]
        return _Costed(policy, parts, timeline, over)

    def tighter(self) -> Search | None:
        """The search to repeat, if the schedule keeps more in flight or the simulator sees a cap passed."""
        most = tuple(max(pair) for pair in zip(self.in_flight, self.search.in_flight, strict=True))
        if most == self.search.in_flight and not any(self.over):
            return None
        left = tuple(max(1, cap - extra) for cap, extra in zip(self.search.caps, self.over, strict=True))
        return replace(self.search, caps=left, in_flight=most)

    def _notes(self) -> dict[str, str]:
        """Without a flush the pipeline stays full: then a step takes as long as the slowest stage."""
        if self.request.weights == "flush":
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


def _refuse_nonsense(graph: OpGraph, cluster: Cluster, stages: int) -> None:
    ops = sum(not op.cheap for op in graph.ops)
    if stages < 1:
        raise PlanError(f"{stages} stages", hint="use at least 1")
    if stages > ops:
        raise PlanError(f"{stages} stages for {ops} ops", hint=f"use at most {ops} stages")
    if stages > len(cluster.devices):
        raise PlanError(
            f"{stages} stages for {len(cluster.devices)} devices", hint="use fewer stages, or add devices"
        )
