"""make_plan: OpGraph x Profile x Cluster -> Plan, by any planner; and the table that explains a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import schedules
from ..ir.cluster import Cluster
from ..ir.costs import StageCost
from ..ir.errors import PlanError
from ..ir.graph import OpGraph
from ..ir.plan import Plan, StagePlan
from ..ir.profile import Profile
from ..ir.schedule import Schedule
from ..ir.stages import StageGraph, chain, cut
from ..lowering import lower
from ..simulator import simulate
from .cost import CostModel, CostOptions
from .infeasible import does_not_fit, explain_infeasible, needs
from .registry import planner
from .search import Search
from .stagecosts import stage_costs

ROUNDS = 5
"""Searches until the schedule and the simulated peaks of the found cut agree with what was searched with."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What else a plan depends on.

    optimizer_bytes: bytes of optimizer state per byte of trainable parameter: SGD 0, with momentum 1, Adam 2.
    split_backward: the schedule splits each backward into I and W.
    overlap: transfers run while stages compute.
    """

    optimizer_bytes: float = 2.0
    split_backward: bool = False
    overlap: bool = True


@dataclass(frozen=True)
class _Request:
    """One call of `make_plan`, checked."""

    graph: OpGraph
    profile: Profile | Mapping[str, Profile]
    cluster: Cluster
    schedule: str
    microbatches: int
    options: PlanOptions

    def search(self, stages: int) -> Search:
        """The search for so many stages on the first devices of the cluster."""
        devices = self.cluster.devices[:stages]
        options = CostOptions(
            microbatches=self.microbatches, optimizer_bytes=self.options.optimizer_bytes,
            overlap=self.options.overlap,
        )  # fmt: skip
        profiles = [_profile_of(self.profile, device.name, self.graph) for device in devices]
        return Search(
            model=CostModel(self.graph, profiles, replace(self.cluster, devices=devices), options),
            caps=tuple(device.memory_bytes for device in devices),
            in_flight=schedules.in_flight(self.build(chain(stages))),
        )

    def build(self, stages: StageGraph) -> Schedule:
        return schedules.build(
            self.schedule, stages, tuple(range(len(stages.stages))), self.microbatches,
            split_backward=self.options.split_backward,
        )  # fmt: skip

    def wider(self, stages: int) -> Search | None:
        """The search on more devices like these, if they are all alike."""
        devices = self.cluster.devices
        if any(device != devices[0] for device in devices):
            return None
        return replace(self, cluster=replace(self.cluster, devices=devices[:1] * stages)).search(stages)


def make_plan(
    graph: OpGraph, profile: Profile | Mapping[str, Profile], cluster: Cluster, *,
    stages: int, schedule: str, microbatches: int, strategy: str = "exact",
    options: PlanOptions = PlanOptions(),  # noqa: B008  frozen
) -> Plan:  # fmt: skip
    """Cut a graph into stages, stage s on device s.

    profile: costs per micro-batch, for all devices or by device name.
    schedule: see `schedules.names`.  microbatches: per step.  strategy: see `planner.names`.
    Raises: PlanError if the request makes no sense; InfeasibleError if nothing fits under the devices'
        memory, with what would.
    """
    _refuse_nonsense(graph, cluster, stages)
    request = _Request(graph, profile, cluster, schedule, microbatches, options)
    find = planner(strategy).find
    search = request.search(stages)
    if stages > (places := len(search.model.cut_points) - 1):
        raise PlanError(
            f"{stages} stages, but ops that share an updated buffer stay together, which leaves {places}",
            hint=f"use at most {places} stages",
        )
    for _ in range(ROUNDS):
        cuts = find(search)
        if not cuts:
            raise explain_infeasible(search, request.wider)
        if any(need > cap for need, cap in zip(needs(search, cuts), search.caps, strict=True)):
            raise does_not_fit(search, cuts, strategy)
        found = _Found(request, search, cuts)
        tighter = found.tighter()
        if tighter is None:
            return found.plan(strategy)
        search = tighter
    raise explain_infeasible(search, request.wider)


class _Found:
    """A cut that the search calls good, as stages, schedule and simulated step."""

    def __init__(self, request: _Request, search: Search, cuts: tuple[int, ...]) -> None:
        self.request, self.search, self.cuts = request, search, cuts
        ops = [op.name for op in search.model.wiring.ops]
        bounds = list(zip(cuts, cuts[1:], strict=False))
        stage_of = {name: s for s, (start, end) in enumerate(bounds) for name in ops[start:end]}
        self.stages = cut(request.graph, stage_of)
        self.schedule = request.build(self.stages)
        self.in_flight = schedules.in_flight(self.schedule)
        self.parts: tuple[StagePlan, ...] = tuple(
            search.model.stage(self.stages, s, q) for s, q in enumerate(self.in_flight)
        )
        self.costs: tuple[StageCost, ...] = stage_costs(search.model, self.stages, self.parts)
        program = lower(self.schedule, self.stages)
        self.timeline = simulate(program, self.stages, self.costs, search.model.cluster)

    def tighter(self) -> Search | None:
        """The search to repeat, if the schedule keeps more in flight or the simulator sees a cap passed."""
        caps = tuple(device.memory_bytes for device in self.search.model.cluster.devices)
        over = [max(0, self.timeline.peak_bytes(rank) - cap) for rank, cap in enumerate(caps)]
        most = tuple(max(pair) for pair in zip(self.in_flight, self.search.in_flight, strict=True))
        if most == self.search.in_flight and not any(over):
            return None
        left = tuple(max(1, cap - extra) for cap, extra in zip(self.search.caps, over, strict=True))
        return replace(self.search, caps=left, in_flight=most)

    def plan(self, strategy: str) -> Plan:
        model = self.search.model
        turns = [model.turn_s(self.stages, s) for s in range(len(self.parts))]
        slowest = max(range(len(turns)), key=turns.__getitem__)
        return Plan(
            graph=self.request.graph.fingerprint,
            planner=strategy,
            stages=self.parts,
            placement=self.schedule.placement,
            schedule=self.schedule.name,
            schedule_rows=tuple(str(self.schedule).splitlines()),
            microbatches=self.request.microbatches,
            microbatch_size=_microbatch_size(self.request.graph),
            batch=model.profile.batch,
            caps=tuple(device.memory_bytes for device in model.cluster.devices),
            predicted_step_s=self.timeline.step_s,
            notes={"slowest": f"stage {slowest}, {turns[slowest]:.6g} s per micro-batch"},
        )


def explain(plan: Plan) -> list[dict[str, Any]]:
    """One row per stage: what it runs, how long, and what it holds. Times in seconds, sizes in bytes."""
    rows = []
    for stage, part in enumerate(plan.stages):
        rank = plan.placement[stage]
        cap = plan.caps[rank] if plan.caps else None
        rows.append(
            {
                "stage": stage,
                "rank": rank,
                "ops": len(part.ops),
                "first_op": part.ops[0],
                "last_op": part.ops[-1],
                "forward_s": part.forward_s,
                "input_grad_s": part.input_grad_s,
                "weight_grad_s": part.weight_grad_s,
                **{f"{kind}_bytes": size for kind, size in asdict(part.memory).items()},
                "peak_bytes": part.memory.total,
                "cap_bytes": cap,
                "filled": part.memory.total / cap if cap else None,
            }
        )
    return rows


def _microbatch_size(graph: OpGraph) -> int:
    """The first dimension that the batch's inputs share; 1 where they do not."""
    sizes = {value.shape[:1] for value in graph.inputs}
    return next(iter(sizes))[0] if len(sizes) == 1 and () not in sizes else 1


def _profile_of(profile: Profile | Mapping[str, Profile], device: str, graph: OpGraph) -> Profile:
    if not isinstance(profile, Profile):
        if device not in profile:
            raise PlanError(
                f"no profile for device {device}", hint=f"profile it too; there are {', '.join(profile)}"
            )
        profile = profile[device]
    if profile.graph != graph.fingerprint:
        raise PlanError(
            f"the profile was made for model {profile.graph}, not for {graph.name} ({graph.fingerprint})",
            hint="profile this model",
        )
    return profile


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
