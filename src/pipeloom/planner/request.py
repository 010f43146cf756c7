"""What is asked of a planner: the model, its costs, the devices, the schedule, and what may be done."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from ..ir.cluster import Cluster, Device
from ..ir.columns import OFFLOAD_
from ..ir.costs import StageCost
from ..ir.errors import PlanError
from ..ir.graph import OpGraph
from ..ir.memory_policy import AT_ONCE, Treatment
from ..ir.plan import Plan
from ..ir.profile import Profile, batch_text
from ..ir.schedule import Schedule
from ..ir.stages import StageGraph, chain, cut, replicate
from ..ir.steady import SteadyStep
from ..ir.timeline import Timeline
from ..ir.weight_policies import WEIGHT_POLICIES, Updates
from ..plan_settings import PlanSettings
from ..schedules import registry
from ..schedules.language.names import LIMIT, parse_name
from .branches import BranchOrdered, Edge, branch_orders, decompose, deepen, graph_edges
from .placement import Layout, layout_of, message_seconds, refuse_microbatches, uplinks_of
from .search.cut_search import Search
from .search.layer_groups import layers
from .stage_cost.model import CostModel, GraphTables, distinct_profiles
from .stage_cost.peak_memory import CostOptions
from .stage_cost.tensors import Array, Readers
from .treatments.choose import Known


class SearchWatch(Protocol):
    """Told often, in the thread that searches."""

    def weighed(self, count: int) -> None:
        """So many stages were weighed so far."""
        ...

    def trying(self, what: str, best: tuple[str, float] | None, bound_s: float) -> None:
        """A candidate is going to be simulated. what: the axis and the schedule.  best: the schedule of the
        best plan so far, and its step in seconds.  bound_s: no step is shorter."""
        ...


MOST_CUTS = 200
"""Cuts that are remembered."""


T = TypeVar("T")


def remembered(known: dict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """What is known by a key, made if it is not; of what is known the oldest goes beyond `MOST_CUTS`."""
    if key not in known:
        if len(known) >= MOST_CUTS:
            del known[next(iter(known))]
        known[key] = make()
    return known[key]


class SimulatedStep(NamedTuple):
    """A step, of these rows, and what each stage took in it."""

    rows: Schedule | SteadyStep
    costs: tuple[StageCost, ...]
    timeline: Timeline


@dataclass(eq=False)
class SharedCosts:
    """tables: of the graph, by the order of ops and profiles.  models: by all that they depend on besides.
    known: of each model, what is known of its stages.  orders: of branches, by the number of stages.
    stages: by the order of ops, where they are cut, and how many replicas there are.
    rows: of orders that do not look at times, by all that they depend on.  steps: by rows and stages, see
    `Candidate`.  edges, earliest_s: see `Request`."""

    tables: dict[Hashable, GraphTables] = field(default_factory=dict)
    models: dict[Hashable, CostModel] = field(default_factory=dict)
    known: dict[CostModel, Known] = field(default_factory=dict)
    orders: dict[int, list[BranchOrdered]] = field(default_factory=dict)
    stages: dict[Hashable, StageGraph] = field(default_factory=dict)
    rows: dict[Hashable, Schedule | SteadyStep] = field(default_factory=dict)
    steps: dict[Hashable, SimulatedStep] = field(default_factory=dict)
    edges: list[Edge] | None = None
    earliest_s: Array | None = None

    def cut(self, graph: OpGraph, readers: Readers, cuts: tuple[int, ...], replicas: int) -> StageGraph:
        """The stages [cuts[s], cuts[s + 1]) of the ops of readers, of so many replicas."""
        key = readers.order, cuts, replicas

        def make() -> StageGraph:
            ops = [op.name for op in readers.ops]
            stage_of = {name: s for s, (i, j) in enumerate(pairwise(cuts)) for name in ops[i:j]}
            return replicate(cut(graph, stage_of), replicas)

        return remembered(self.stages, key, make)

    def tables_of(self, graph: OpGraph, profiles: Sequence[Profile], order: tuple[int, ...]) -> GraphTables:
        """Those of cost models for these profiles, one per stage."""
        distinct = distinct_profiles(profiles)
        key = order, tuple(map(id, distinct))
        forward = self.tables_of(graph, profiles, ()) if order else None
        return remembered(self.tables, key, lambda: GraphTables(graph, distinct, order, forward))


MANY_ORDERS, FEW_ORDERS, SMALL = 24, 3, 32
"""Orders of branches that are looked at; many while there are at most `SMALL` ops."""

HALF_A_STAGE = 0.5
"""Share of a stage's compute that branches must have together, the heaviest left out, to be pulled apart."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanSettings):
    """The settings, and what only callers of a planner say.

    Planners plan one pipeline: `microbatches` are those of one, and `replicas` only says how many there are.
    fastest: look for the fastest plan; if not, the first that keeps its caps will do.
    offloaded_at_once: see `MemoryPolicy.at_once`; fewer are tried where nothing fits.
    schedules: by name, among which a planner that chooses one does so; (): all that are worth a try.
    simpler_within: of plans that are slower than the fastest by no larger share, the joint search takes that
        with the fewest stages, each counted as often as ranks hold it, and looks for no faster order. What
        waits for messages is predicted worst, and worst of all where ranks share cores.
    any_width: a planner that searches may have several pipelines of fewer ranks side by side instead.
    """

    fastest: bool = True
    offloaded_at_once: int = AT_ONCE
    schedules: tuple[str, ...] = ()
    simpler_within: float = 0.0
    any_width: bool = False


class MakesPlan(Protocol):
    """Makes the plan of a request; raises as `make_plan`. explained: see there."""

    def __call__(self, request: Request, *, explained: bool) -> Plan: ...


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A way to make a plan.

    plan: makes it, see planners.py.  granularity: the smallest piece that it moves.
    optimises: whether it may recompute and offload residuals: never, if asked, or unless told otherwise.
    source: where it is from.
    """

    plan: MakesPlan
    granularity: Literal["op", "module", "layer"]
    about: str
    source: str
    optimises: Literal["never", "asked", "always"] = "never"


@dataclass(frozen=True)
class Request:
    """What is asked of a planner for one model."""

    graph: OpGraph
    profile: Profile | Mapping[str, Profile]
    cluster: Cluster
    options: PlanOptions
    planner: Planner
    watch: SearchWatch | None = None
    slack: int = 0
    """Micro-batches that a stage may hold besides as many as it is deep, where its stages form a DAG."""
    only_offloading: bool = False
    """Whether the same with more micro-batches offloaded at once found nothing: then only what offloads is
    tried."""
    shared: SharedCosts = field(default_factory=SharedCosts, compare=False, repr=False)
    """With other requests for the same graph, profile and cluster."""

    @property
    def schedule(self) -> str:
        return self.options.named_schedule

    @property
    def microbatches(self) -> int:
        return self.options.microbatches

    @cached_property
    def entry(self) -> registry.Entry:
        return registry.entry(self.schedule)

    @property
    def weights(self) -> str:
        """How weights are updated: as asked, or as the schedule does it."""
        return self.options.weights or self.entry.weights

    @property
    def branched(self) -> bool:
        """Whether stages may form a DAG."""
        return self.options.branches and self.layout.in_line

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.schedule, len(self.cluster.devices))

    @cached_property
    def usual_rows(self) -> Schedule | SteadyStep:
        """What a plan's rows are for a chain and equal times."""
        return self.rows(replicate(chain(self.layout.stages), self.layout.replicas))

    @cached_property
    def usual(self) -> Schedule:
        return unrolled(self.usual_rows)

    @cached_property
    def copies(self) -> bool:
        """Whether the schedule says itself which residuals are offloaded."""
        name = parse_name(self.schedule)
        if not (name.in_file or LIMIT in name.options):  # then it need not be built to know
            return name.copies or self.entry.offload is not None
        columns = self.usual.columns
        return bool((columns.kind == OFFLOAD_).any())

    @cached_property
    def fits_caps(self) -> bool:
        """Whether it says so of as much as it takes to keep the caps."""
        return self.copies and parse_name(self.schedule).fits_caps

    @cached_property
    def treatments(self) -> tuple[Treatment, ...]:
        """What may be done with residuals, where the schedule does not say it."""
        if self.copies:
            return ()
        asked = self.options.allowed
        if asked is not None:
            return tuple(t for t in asked if t != "keep")
        if self.planner.optimises != "always":
            return ()
        return ("recompute", "offload") if self.may_offload else ("recompute",)

    @property
    def may_offload(self) -> bool:
        """Whether all devices have a link to the host, and offloading is allowed."""
        linked = all(device.host_link is not None for device in self.cluster.devices)
        return linked and (self.options.allowed is None or "offload" in self.options.allowed)

    @property
    def makes_again(self) -> bool:
        """Whether a stage that the schedule itself has offloaded may make cheap residuals again instead: not
        where offloading alone is allowed."""
        return self.options.allowed is None or "recompute" in self.options.allowed

    def refuse_what_cannot_be(self) -> None:
        """Raises: PlanError if what is asked for contradicts the planner, the devices or the schedule."""
        refuse_microbatches(self.schedule, self.microbatches, self.layout.replicas)
        if self.treatments and self.planner.optimises == "never":
            raise PlanError(
                f"this planner keeps every residual, it cannot {' or '.join(self.treatments)}",
                hint="use planner dawnpiper, probe, vpipe or exact",
            )
        if self.copies and self.options.allowed is not None and "offload" not in self.options.allowed:
            raise PlanError(
                f"{self.schedule} offloads, and the treatments that are allowed do not",
                hint="choose a schedule without copies, or allow offload (--treatments both)",
            )
        if self.options.offload_dir is not None and self.planner.optimises == "never" and not self.copies:
            raise PlanError(
                f"this planner keeps every residual, and {self.options.offload_dir} is to be offloaded to",
                hint="leave that out, or use planner dawnpiper, probe, vpipe or exact",
            )
        bare = next((d.name for d in self.cluster.devices if d.host_link is None), None)
        if ("offload" in self.treatments or self.copies) and bare is not None:
            without = "choose a schedule without copies" if self.copies else "allow recompute only"
            raise PlanError(
                f"residuals cannot be offloaded from device {bare}, which has no link to the host",
                hint="on this machine's CPU name a folder with --offload-dir; elsewhere give the device a "
                f"host_link in the cluster file; or {without}",
            )

    @cached_property
    def layers(self) -> Mapping[str, int]:
        """Op -> number of its layer."""
        ops = [op for op in self.graph.ops if not op.cheap]
        return {op.name: n for n, piece in enumerate(layers(ops)) for op in ops[piece.start : piece.end]}

    @property
    def edges(self) -> list[Edge]:
        """Which op reads from which, by position in the forward."""
        if self.shared.edges is None:
            self.shared.edges = graph_edges(Readers(self.graph))
        return self.shared.edges

    @property
    def earliest_s(self) -> Array:
        """Seconds, by position in the forward, before which no op can begin, on the fastest devices."""
        if self.shared.earliest_s is None:
            self.shared.earliest_s = self._earliest_s()
        return self.shared.earliest_s

    def _earliest_s(self) -> Array:
        names = {device.name for device in self.cluster.devices}
        each = [profile_of(self.profile, name, self.graph).costs for name in names]
        ops = [op.name for op in self.graph.ops if not op.cheap]
        took = [min(costs[name].forward_s for costs in each) for name in ops]
        begins = np.zeros(len(ops))
        for before, after in self.edges:  # by who is read, so that its own time is known
            begins[after] = max(begins[after], begins[before] + took[before])
        return begins

    def branch_orders(self, stages: int) -> list[BranchOrdered]:
        """The ops in orders in which stages may be cut from them: branches stand together where all but the
        heaviest of them would fill `HALF_A_STAGE`. The first is the one that planners of chains see."""
        if stages in self.shared.orders:
            return self.shared.orders[stages]
        profile = profile_of(self.profile, self.cluster.devices[0].name, self.graph)
        costs = [profile.costs[op.name] for op in self.graph.ops if not op.cheap]
        seconds = np.array([cost.forward_s + cost.backward_s for cost in costs])
        most = MANY_ORDERS if len(seconds) <= SMALL else FEW_ORDERS
        least_s = HALF_A_STAGE * float(seconds.sum()) / stages
        tree = decompose(len(seconds), self.edges)
        found = branch_orders(tree, seconds, least_s, most, self.edges)
        self.shared.orders[stages] = found
        return found

    @property
    def orders_to_try(self) -> list[BranchOrdered]:
        """The first few; none of a model without branches."""
        orders = self.branch_orders(self.layout.stages)
        return orders[:FEW_ORDERS] if len(orders) > 1 or orders[0].borders else []

    @cached_property
    def models(self) -> tuple[CostModel, ...]:
        """The costs of the stages of each replica, on the devices of their ranks."""
        return tuple(self._model(replica) for replica in range(self.layout.replicas))

    def _model(self, replica: int, ordered: BranchOrdered | None = None) -> CostModel:
        """The costs of one replica's stages.  ordered: see `search`."""
        layout, ordered = self.layout, ordered or self.first_order
        ranks = ranks_that_cost(layout.placement, layout.stages, replica, self.cluster.devices)
        devices = tuple(self.cluster.devices[rank] for rank in ranks)
        options = CostOptions(
            microbatches=self.microbatches // layout.replicas * layout.most_replicas,
            weights=self.weights,
            clips=self.options.clips,
            width=self.options.replicas,
            sharing=self.options.sharing,
            offloaded_at_once=self.options.offloaded_at_once,
        )
        order = ordered.ops if ordered.borders else ()

        def make() -> CostModel:
            profiles = [profile_of(self.profile, device.name, self.graph) for device in devices]
            cluster = replace(self.cluster, devices=devices)
            tables = self.shared.tables_of(self.graph, profiles, order)
            return CostModel(self.graph, profiles, cluster, options, order, ranks=ranks, tables=tables)

        return remembered(self.shared.models, (options, order, ranks), make)

    @cached_property
    def first_order(self) -> BranchOrdered:
        """The order of branches that planners of chains see."""
        return self.branch_orders(self.layout.stages)[0]

    def search(self, ordered: BranchOrdered | None = None) -> Search:
        """The search for stages that may each fill the device of their rank, where there is but one of them.
        With several on a rank, or replicas, `Candidate.tighter` says what is left for each.

        ordered: one of the orders of branches; the first unless given.
        """
        layout, devices = self.layout, self.cluster.devices
        count = layout.stages
        held = registry.in_flight(self.usual, on_device=True)
        homes = [layout.homes(stage) for stage in range(count)]
        model = self.models[0] if ordered is None else self._model(0, ordered)
        return Search(
            model=model,
            known=self.shared.known.setdefault(model, {}),
            caps=tuple(min(devices[rank].memory_bytes for rank in ranks) for ranks in homes),
            in_flight=tuple(max(held[stage::count]) for stage in range(count)),
            treatments=self.treatments,
            watch=None if self.watch is None else self.watch.weighed,
            layers=self.layers if self.planner.granularity == "layer" else {},
            borders=(ordered or self.first_order).borders,
        )

    @property
    def updates(self) -> Updates | None:
        """When weights change in a pipeline that does not drain; None for one that does."""
        if WEIGHT_POLICIES[self.weights].flushes:
            return None
        return Updates(policy=self.weights, every=self.microbatches // self.layout.replicas)

    def rows(
        self,
        stages: StageGraph,
        costs: Sequence[StageCost] | None = None,
        *,
        room: tuple[float, ...] | None = None,
    ) -> Schedule | SteadyStep:
        """What a plan's rows are: one step, or the step that repeats. Those of a chain are good for any graph
        of stages: each waits for more than it needs.

        stages: of all replicas.  costs: of each, for schedules that order by time; equal ones by default.
        room: bytes that each rank has for residuals, for schedules that fit the caps.
        Raises: ScheduleError if the schedule does not repeat, or breaks the rule of weight versions.
        """
        layout, split = self.layout, self.options.split_backward
        times: dict[str, Any] = {}
        if costs is not None:
            messages = message_seconds(stages, layout.placement, self.cluster)
            uplinks = uplinks_of(costs, layout.placement, self.cluster)
            times = {"costs": costs, "transfer_s": messages, "uplinks": uplinks, "room_bytes": room}
        if not self.options.branches:
            stages = replicate(chain(layout.stages), layout.replicas)
        elif self.slack and layout.in_line:
            stages = deepen(stages, self.slack)
        updates, count = self.updates, self.microbatches // layout.replicas

        def make() -> Schedule | SteadyStep:
            how: Any = {"split_backward": split, **times}
            if updates is not None:
                return registry.build_steady(self.schedule, stages, layout.placement, updates, **how)
            return registry.build(self.schedule, stages, layout.placement, count, **how)

        if times:
            return make()
        edges = tuple((edge, bool(stages.gradients(*edge))) for edge in sorted(stages.between))
        tied = tuple(stages.tied.items()) if updates is not None else ()
        shape = len(stages.stages), stages.replicas, stages.loss_stage, edges, tied
        return remembered(
            self.shared.rows, (self.schedule, layout.placement, count, updates, split, shape), make
        )

    def wider(self, stages: int) -> Search | None:
        """The search on more devices like these, if they are all alike, with a stage on each."""
        devices = self.cluster.devices
        if not self.layout.in_line or any(device != devices[0] for device in devices):
            return None
        wider = replace(self.cluster, devices=devices[:1] * stages)
        return replace(self, cluster=wider, shared=SharedCosts()).search()


def unrolled(rows: Schedule | SteadyStep) -> Schedule:
    """The schedule of a plan's rows."""
    return rows.unrolled if isinstance(rows, SteadyStep) else rows


def are_alike(one: Device, two: Device) -> bool:
    """Whether stages cost the same on two devices, which may be in different places."""
    return one == replace(two, node=one.node, group=one.group, switch=one.switch)


def ranks_that_cost(
    placement: tuple[int, ...], stages: int, replica: int, devices: Sequence[Device]
) -> tuple[int, ...]:
    """The ranks of a replica's stages; where all devices are like those of the first replica, its ranks."""
    first, own = placement[:stages], placement[replica * stages :][:stages]
    alike = all(are_alike(devices[a], devices[b]) for a, b in zip(first, own, strict=True))
    return first if alike else own


def profile_of(profile: Profile | Mapping[str, Profile], device: str, graph: OpGraph) -> Profile:
    """The profile of a graph on a device. Raises: PlanError if it is missing, or of something else."""
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
    if profile.batch and profile.batch != (batch := batch_text(graph.inputs)):
        raise PlanError(
            f"the profile is of micro-batches {', '.join(profile.batch)}, the model was captured with "
            f"{', '.join(batch)}",
            hint="profile with the micro-batch size that the plan is for",
        )
    return profile
