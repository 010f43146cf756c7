"""What the stages of a plan cost on the devices of their ranks, and the step that these costs add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ..ir.action import STEP
from ..ir.cluster import Cluster
from ..ir.costs import StageCost
from ..ir.errors import PlanError
from ..ir.graph import LOWER_PRECISION, OpGraph, UpdateBytes, step_bytes
from ..ir.plan import Plan, StagePlan
from ..ir.profile import Profile
from ..ir.shared_weights import names_for_owners, optimizer_shares
from ..ir.stages import StageGraph
from ..ir.timeline import Timeline
from ..lowering.passes import lower
from ..schedules import registry
from ..simulator.all_reduce import all_gather_s
from ..simulator.simulate import simulate
from .request import profile_of, ranks_that_cost
from .stage_cost.model import CostModel
from .stage_cost.peak_memory import CostOptions
from .stage_cost.stage_estimate import cost_stage, estimate_stage

Profiles: TypeAlias = Profile | Mapping[str, Profile]
"""One profile for all devices, or by device name."""


@dataclass(frozen=True, eq=False)
class PlanCosts:
    """Costs of all plans that are made of one graph for one cluster.

    The cost model of a placement is made once: plans that differ in their cuts, schedules and caps share
    it, and so do replicas on devices that are alike.
    sharing: of plans of one pipeline, how many like it share out the optimizer's state.
    """

    graph: OpGraph
    profiles: Profiles
    cluster: Cluster
    sharing: int = 1
    _models: dict[tuple[tuple[int, ...], CostOptions], CostModel] = field(default_factory=dict, repr=False)

    def stages(self, plan: Plan) -> tuple[StageCost, ...]:
        """What each stage of a plan, replicas included, takes on the device of its rank.

        Raises: PlanError if the cluster has too few devices, or one without a profile.
        """
        stages = plan.replicated(plan.stage_graph(self.graph))
        treatments = [plan.memory.of_stage(s) for s in range(len(plan.stages))]
        # Of what a StageCost says, only weight versions depend on how many micro-batches are in flight.
        in_flight = registry.in_flight(plan.as_schedule)
        ahead = plan.memory.ahead
        known: dict[int, list[StageCost]] = {}
        costs: list[StageCost] = []
        for replica in range(plan.replicas):
            model = self._model(plan, replica, self.sharing)
            if id(model) not in known:
                known[id(model)] = [
                    cost_stage(model, stages, s, treatment, max(1, in_flight[s]), ahead=s in ahead)
                    for s, treatment in enumerate(treatments)
                ]
            costs += known[id(model)]
        return count_once(
            costs,
            stages,
            self.graph,
            placement=plan.placement,
            shared_out=self.cluster if plan.shard_optimizer and plan.replicas > 1 else None,
            sharing=self.sharing,
        )

    def figures(self, plan: Plan) -> tuple[StagePlan, ...]:
        """The stages of a plan, with what each takes on the device of its rank. Raises: as `stages`."""
        sharing = plan.width if plan.shard_optimizer else 1
        stages, model = plan.stage_graph(self.graph), self._model(plan, 0, sharing)
        in_flight, found = registry.in_flight(plan.as_schedule), list[StagePlan]()
        for s in range(len(plan.stages)):
            one = estimate_stage(model, stages, s, plan.memory.of_stage(s))
            found.append(one.plan(max(1, in_flight[s]), ahead=s in plan.memory.ahead, turn_s=one.turn_s))
        return tuple(found)

    def simulate(self, plan: Plan) -> Timeline:
        stages = plan.replicated(plan.stage_graph(self.graph))
        program = lower(plan.as_schedule, stages, policy=plan.memory, updates=plan.updates, clips=plan.clips)
        return simulate(program, stages, self.stages(plan), self.cluster, caps=plan.caps)

    def _model(self, plan: Plan, replica: int, sharing: int = 1) -> CostModel:
        if (ranks := max(plan.placement) + 1) > len(self.cluster.devices):
            raise PlanError(
                f"the plan is for {ranks} devices, the cluster has {len(self.cluster.devices)}",
                hint="name a cluster of as many devices, or plan for this one",
            )
        devices = self.cluster.devices
        placement = ranks_that_cost(plan.placement, len(plan.stages), replica, devices)
        options = CostOptions(
            microbatches=max(map(plan.microbatches_on, placement)),
            weights=plan.weights,
            clips=plan.clips,
            width=plan.width,
            sharing=sharing,
            offloaded_at_once=plan.memory.at_once,
        )
        if (placement, options) not in self._models:
            devices = tuple(devices[rank] for rank in placement)
            profiles = [profile_of(self.profiles, device.name, self.graph) for device in devices]
            self._models[placement, options] = CostModel(
                self.graph, profiles, replace(self.cluster, devices=devices), options, ranks=placement
            )
        return self._models[placement, options]


def with_planned_state(graph: OpGraph, plan: Plan) -> OpGraph:
    """A graph that does not say what the optimizer takes, with the state per trained byte of a plan."""
    trained = [p for p in graph.parameters if p.trainable]
    gradients = sum(stage.memory.gradients for stage in plan.stages)
    if not gradients or any(p.given_update for p in trained):
        return graph
    options = CostOptions(microbatches=1, weights=plan.weights, clips=plan.clips, width=plan.width)
    # Of replicas that share out the optimizer, a plan counts an even share.
    copies = options.gradient_sets * (plan.width if plan.shard_optimizer else 1)
    ratio = sum(stage.memory.optimizer for stage in plan.stages) * copies / gradients
    updates = {}
    for p in trained:
        master = 2 * p.bytes if plan.master_weights and p.dtype in LOWER_PRECISION else 0
        size = master or p.bytes
        updates[p.name] = UpdateBytes(state=round(size * ratio), step=size, master=master)
    return graph.with_updates(updates)


def count_once(
    costs: Sequence[StageCost],
    stages: StageGraph,
    graph: OpGraph,
    *,
    placement: Sequence[int],
    shared_out: Cluster | None,
    sharing: int = 1,
) -> tuple[StageCost, ...]:
    """Costs of stages of which several are on a rank: a parameter that they read is there once, and so is the
    batch; the first of them counts it. The optimizer steps all parameters of the rank at once.

    stages: of all replicas, with the costs and the rank of each.
    shared_out: where replicas share out the optimizer's state, the cluster of their ranks. A rank then holds
        and steps its share only, gets the sums of its gradients only, and waits for what the others have
        updated, which the runtime does within STEP.
    sharing: pipelines like this one that share it out. Each counts an even share.
    """
    read: dict[int, set[str]] = {}
    trained_bytes = {p.name: p.bytes for p in graph.parameters if p.trainable}
    shares = optimizer_shares(stages, placement, trained_bytes) if shared_out is not None else ()
    for_owners = names_for_owners(stages, placement, shares) if shares else ()
    stepped: dict[int, set[str]] = {}
    for rank, names in zip(placement, stages.params, strict=True):
        own = shares[rank].of(rank) if shares else trained_bytes.keys()
        stepped.setdefault(rank, set()).update(own & set(names))
    scratch = {r: step_bytes(graph.parameter[n].update for n in names) for r, names in stepped.items()}
    corrected = []
    for cost, rank, names in zip(costs, placement, stages.params, strict=True):
        batch = cost.static_bytes.get("batch", 0) if rank in read else 0
        new = set(names) - read.setdefault(rank, set())
        shared = [graph.parameter[name] for name in names if name in read[rank]]
        read[rank].update(names)
        saved = {
            "parameters": sum(p.kept_bytes for p in shared),
            "gradients": sum(p.gradient_bytes for p in shared if p.trainable),
            "optimizer": sum(p.update.state for p in shared if p.trainable) // sharing,
            "batch": batch,
        }
        static = {kind: max(0, size - saved.get(kind, 0)) for kind, size in cost.static_bytes.items()}
        step_s, owned = cost.step_s, for_owners[rank] if for_owners else frozenset[str]()
        if shared_out is not None:
            here = new & stepped[rank]
            static["optimizer"] = sum(graph.parameter[name].update.state for name in here)
            of = {name: graph.parameter[name].gradient_bytes for name in new if name in trained_bytes}
            size = sum(of.values())
            step_s *= sum(of[name] for name in here) / size if size else 1.0
            step_s += all_gather_s(size, shares[rank].ranks, shared_out)
        transient = {**cost.transient_bytes, STEP: scratch[rank]}
        corrected.append(
            replace(cost, static_bytes=static, transient_bytes=transient, step_s=step_s, for_owners=owned)
        )
    return tuple(corrected)
