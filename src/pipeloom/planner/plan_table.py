"""A plan in rows that people and programs can read, what limits it, and what a bit more would buy.

k is the ratio of copying to computing: how much offloading hides behind the computing of a stage.

    k = (seconds that everything offloaded takes out and back) / (seconds of the stage's F, I and W)
      = 2 bytes / (bandwidth x compute seconds)     where both directions are equally fast

Both directions run at once, so a device with a link of its own uses it for k/2 of the time; where two devices
share one duplex uplink, each direction is used for k. While that is at most 1 all copies hide behind
computing in the long run. So of v stages on a rank about v / utilisation may be offloaded whole.

Source: PipeOffload (arXiv 2503.01328), section 1; the bound by utilisation is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

from ..checks.updates import UpdateProof, prove_updates
from ..ir.cluster import Cluster, Device, Link
from ..ir.errors import PlanError, ScheduleError
from ..ir.flow import flow_of
from ..ir.graph import OpGraph
from ..ir.plan import Plan, StagePlan
from ..ir.shared_weights import optimizer_shares
from ..ir.stages import StageGraph
from ..ir.text import format_bytes, show_time
from ..lowering.passes import lower
from .branch_gain import branch_figures
from .candidate import EQUAL_TIMES
from .search.layer_groups import layer_names


def prove_plan(plan: Plan, graph: OpGraph) -> UpdateProof:
    """That the program of a plan updates weights as its rule says. Raises: ScheduleError."""
    stages = plan.replicated(plan.stage_graph(graph))
    sizes = {p.name: p.bytes for p in graph.parameters if p.trainable}
    return prove_updates(
        lower(plan.as_schedule, stages, policy=plan.memory, updates=plan.updates, clips=plan.clips),
        stages,
        updates=plan.updates,
        shares=optimizer_shares(stages, plan.placement, sizes) if plan.shard_optimizer else (),
        trained=sizes,
    )


CopyLoad: TypeAlias = tuple[float | None, float | None, int | None]
"""`offload_ratio`, `link_use` and `offloadable_stages` of a `PlannedStage`."""


def _copy_loads(plan: Plan, cluster: Cluster | None) -> list[CopyLoad]:
    """That of each stage of a plan's first replica."""
    if cluster is None:
        return [(None, None, None)] * len(plan.stages)
    loads = [_load(part, cluster, plan.placement[stage]) for stage, part in enumerate(plan.stages)]
    allowed = {rank: _allowed(plan, loads, rank) for rank in set(plan.placement)}
    return [
        (None, None, None) if load is None else (*load, allowed[rank])
        for load, rank in zip(loads, plan.placement, strict=False)
    ]


def _seconds(part: StagePlan) -> float:
    return part.forward_s + part.input_grad_s + part.weight_grad_s + part.recompute_s


def _load(part: StagePlan, cluster: Cluster, rank: int) -> tuple[float, float] | None:
    """k and the link's utilisation of one stage."""
    device, size, compute_s = cluster.devices[rank], part.kept_bytes + part.offloaded_bytes, _seconds(part)
    if device.host_link is None or device.reload_link is None or compute_s <= 0:
        return None
    out, back = (size / link.bandwidth_bytes_per_s for link in (device.host_link, device.reload_link))
    busy = max(out, back) / compute_s
    if device.switch is not None:
        sharing = sum(other.switch == device.switch for other in cluster.devices)
        uplink = cluster.switches[device.switch].bandwidth_bytes_per_s
        busy = max(busy, sharing * size / uplink / compute_s)
    return (out + back) / compute_s, busy


def _allowed(plan: Plan, loads: Sequence[tuple[float, float] | None], rank: int) -> int:
    """How many stages of a rank, from the first on, keep its link busy for no longer than it computes."""
    own = [stage for stage in range(len(loads)) if plan.placement[stage] == rank]
    whole_s = sum(_seconds(plan.stages[stage]) for stage in own)
    copying_s, count = 0.0, 0
    for stage in own:
        load = loads[stage]
        if load is None:
            break
        copying_s += load[1] * _seconds(plan.stages[stage])
        if copying_s > whole_s * (1 + 1e-9):
            break
        count += 1
    return count


MORE = 1.1


@dataclass(frozen=True, kw_only=True)
class Change:
    """what: as "10 % more memory".  step_s: with it, None if no plan fits even so.  gain: share of the step's
    time that it saves; 0 if there was no plan before.
    """

    what: str
    step_s: float | None
    gain: float


def changed_clusters(cluster: Cluster) -> Mapping[str, Cluster]:
    """By what is different: memory, links between devices, links to the host where there are any."""
    more = f"{(MORE - 1) * 100:.0f} % more"
    found = {
        f"{more} memory": _devices(cluster, lambda d: {"memory_bytes": int(d.memory_bytes * MORE)}),
        f"{more} bandwidth between devices": replace(
            cluster,
            within_node=_faster(cluster.within_node),
            between_nodes=_maybe(cluster.between_nodes),
            node_link=_maybe(cluster.node_link),
            groups={name: _faster(link) for name, link in cluster.groups.items()},
        ),
    }
    if any(device.host_link is not None for device in cluster.devices):
        found[f"{more} bandwidth to the host"] = replace(
            _devices(
                cluster,
                lambda d: {
                    "host_link": _maybe(d.host_link),
                    "host_link_back": _maybe(d.host_link_back),
                },
            ),
            switches={name: _faster(link) for name, link in cluster.switches.items()},
        )
    return found


def one_more(cluster: Cluster, ranks: int) -> Cluster:
    """With a device more than so many ranks have, like the last of these unless there is one."""
    devices = cluster.devices[: ranks + 1]
    return replace(cluster, devices=devices if len(devices) > ranks else (*devices, devices[-1]))


def what_if(
    plan: Plan | None, clusters: Mapping[str, Cluster], again: Callable[[Cluster], Plan]
) -> list[Change]:
    """What each change would make of a plan; None: of a request for which there was none.

    clusters: by what is different.  again: makes the plan for another cluster.
    """
    changes = []
    for what, other in clusters.items():
        try:
            step_s = again(other).predicted_step_s
        except (PlanError, ScheduleError):
            changes.append(Change(what=what, step_s=None, gain=0.0))
            continue
        gain = 1 - step_s / plan.predicted_step_s if plan is not None and plan.predicted_step_s else 0.0
        changes.append(Change(what=what, step_s=step_s, gain=gain))
    return changes


def _devices(cluster: Cluster, better: Callable[[Device], dict[str, object]]) -> Cluster:
    return replace(cluster, devices=tuple(replace(d, **better(d)) for d in cluster.devices))  # type: ignore[arg-type]


def _faster(link: Link) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * MORE)


def _maybe(link: Link | None) -> Link | None:
    return None if link is None else _faster(link)


FULL = 0.95
"""Share of its cap from which on a stage is called full."""


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage of a plan: what it runs, how long, and what it holds. Times in seconds, of one micro-batch.

    ranks: all that it is on, one of each replica; rank is the first, whose node and cap follow.
    layers: as "h.0 .. 3".  reads: the stages that it reads.  depth: ranks of its longest path to the end.
    Bytes by kind are at the peak; kept, recomputed and offloaded bytes are of one micro-batch's residuals.
    peak_bytes: their sum; of a stage alone on its rank, what that holds in the simulated step if known.
    filled: share of its rank's cap, by all that the rank holds in the simulated step where that is known.
    What offloading all residuals that are not made again would ask of the device's link, None without one:
    offload_ratio: k.  link_use: share of the time in which the busier direction copies, with those that share
        the uplink copying as much.  offloadable_stages: how many stages of its rank may leave whole, its
        first ones, whose residuals live longest, until its link is busy all the time.
    """

    stage: int
    rank: int
    ranks: tuple[int, ...]
    node: int | None
    ops: int
    first_op: str
    last_op: str
    layers: str
    reads: tuple[int, ...] | None
    depth: int | None
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    recompute_s: float
    offload_s: float
    reload_s: float
    turn_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    residuals_bytes: int
    boundary_bytes: int
    transient_bytes: int
    kept_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    peak_bytes: int
    cap_bytes: int | None
    filled: float | None
    offload_ratio: float | None
    link_use: float | None
    offloadable_stages: int | None


OF_STAGES = (
    *("forward_s", "input_grad_s", "weight_grad_s", "recompute_s", "offload_s", "reload_s", "turn_s"),
    *("kept_bytes", "recomputed_bytes", "offloaded_bytes"),
)
"""What `StagePlan` has under the same names."""


def plan_rows(plan: Plan, graph: OpGraph | None = None, cluster: Cluster | None = None) -> list[PlannedStage]:
    """One row per stage of the first replica.

    graph: to say which layers it has, which stages it reads, and how deep it is.
    cluster: to say on which node each stage is, and what offloading would ask of links.
    """
    rows = []
    loads = _copy_loads(plan, cluster)
    reads, depths = ([], []) if graph is None else reads_and_depths(plan, plan.stage_graph(graph))
    layer_of = {} if graph is None else layer_names(graph.ops)
    alone = len(set(plan.placement)) == len(plan.placement)
    for stage, (part, (ratio, use, offloadable)) in enumerate(zip(plan.stages, loads, strict=True)):
        rank = plan.placement[stage]
        cap = plan.caps[rank] if plan.caps else None
        peak = plan.peaks[rank] if plan.peaks else part.memory.total
        rows.append(
            PlannedStage(
                stage=stage,
                rank=rank,
                ranks=plan.placement[stage :: len(plan.stages)],
                node=None if cluster is None else cluster.devices[rank].node,
                ops=len(part.ops),
                first_op=part.ops[0],
                last_op=part.ops[-1],
                layers="" if graph is None else layers_in(part, graph, layer_of),
                reads=reads[stage] if reads else None,
                depth=depths[stage] if depths else None,
                **{name: getattr(part, name) for name in OF_STAGES},
                **{f"{kind}_bytes": size for kind, size in asdict(part.memory).items()},
                peak_bytes=peak if alone else part.memory.total,
                cap_bytes=cap,
                filled=peak / cap if cap else None,
                offload_ratio=ratio,
                link_use=use,
                offloadable_stages=offloadable,
            )
        )
    return rows


def reads_and_depths(plan: Plan, stages: StageGraph) -> tuple[list[tuple[int, ...]], list[int]]:
    """Per stage of a replica those that it reads, ascending, and the ranks of its longest path to the end."""
    flow = flow_of(stages)
    depth = [1] * len(stages.stages)
    for stage in reversed(flow.order):
        for reader in flow.read_by[stage]:
            moves = plan.placement[reader] != plan.placement[stage]
            depth[stage] = max(depth[stage], depth[reader] + moves)
    return [tuple(sorted(before)) for before in flow.reads_from], depth


def layers_in(part: StagePlan, graph: OpGraph, layer_of: Mapping[str, str]) -> str:
    """The repeated layers that a stage has ops of, first and last, as "h.0 .. 3"; "" if none.

    layer_of: see `layer_names`.
    """
    found = list(dict.fromkeys(filter(None, (layer_of[graph.op[name].module] for name in part.ops))))
    if len(found) < 2:
        return "".join(found)
    (container, _, _), (other, _, number) = found[0].rpartition("."), found[-1].rpartition(".")
    return f"{found[0]} .. {number if container == other else found[-1]}"


def _gain_of_branches(plan: Plan) -> list[str]:
    if not (figures := branch_figures(plan)):
        return []
    dag, row = figures["branches"], figures["no_branches"]
    handed_on = ""
    if sequential_s := row.get("sequential_step_s"):
        waiting = "as a sequential pipeline, whose stages wait for the one in front,"
        handed_on = f", and {waiting} {show_time(sequential_s)}"
    of_one = f" of one of {plan.width} pipelines, whose gradients are not summed" if plan.width > 1 else ""
    return [
        f"branched stages{of_one}: {dag['depth']:.0f} deep, a step of {show_time(dag['step_s'])}, at "
        f"most {format_bytes(int(dag['peak_bytes']))} on a rank; as a chain (--no-branches) "
        f"{row['depth']:.0f} deep, {show_time(row['step_s'])}, {format_bytes(int(row['peak_bytes']))}"
        f"{handed_on}"
    ]


def limits(plan: Plan) -> list[str]:
    """What keeps a plan from being faster, as sentences: the slowest stage, what its time goes into, and
    which stages are full."""
    times = [part.turn_s for part in plan.stages]
    slowest = max(range(len(times)), key=times.__getitem__)
    part = plan.stages[slowest]
    compute = part.forward_s + part.input_grad_s + part.weight_grad_s
    mean = sum(times) / len(times)
    above = f", {times[slowest] / mean - 1:.0%} above the mean" if mean else ""
    said = []
    if len(times) > 1:
        said.append(f"stage {slowest} is the slowest: {show_time(times[slowest])} per micro-batch{above}")
    if part.recompute_s:
        said.append(f"{show_time(part.recompute_s)} per micro-batch make residuals again")
    if (waits := times[slowest] - compute - part.recompute_s) > 1e-3 * times[slowest]:
        said.append(f"{show_time(waits)} per micro-batch wait for transfers and copies")
    if plan.caps:
        said += _full(plan)
    if plan.replicas > plan.width:
        said.append(
            f"{plan.schedule} runs micro-batches in {plan.replicas} directions: each stage is on as many "
            "ranks, which sum its gradients"
        )
    holders = [s for s, part in enumerate(plan.stages) if part.memory.parameters]
    if plan.replicas > 1 and len(holders) == 1:
        said.append(
            f"stage {holders[0]} has all parameters, so this is data parallelism: {plan.replicas} ranks hold "
            "the whole model each, and share out the micro-batches"
        )
    if EQUAL_TIMES in plan.notes:
        said.append(
            f"the order is that of {plan.schedule} for equal times: ordered by these stages' times, a step "
            "does not repeat or stops"
        )
    return said + _gain_of_branches(plan)


def _full(plan: Plan) -> list[str]:
    alone = sorted(plan.placement) == list(range(len(plan.stages)))
    what = "stage" if alone else "rank"
    held = [0] * len(plan.caps)
    for part, rank in zip(plan.stages * plan.replicas, plan.placement, strict=True):
        held[rank] += part.memory.total
    held = list(plan.peaks) or held
    number = {rank: stage for stage, rank in enumerate(plan.placement)} if alone else {}
    full = [number.get(rank, rank) for rank, cap in enumerate(plan.caps) if held[rank] >= FULL * cap]
    if not full:
        rank = max(range(len(held)), key=lambda rank: held[rank] / plan.caps[rank])
        size, cap = format_bytes(held[rank]), format_bytes(plan.caps[rank])
        share = f"{held[rank] / plan.caps[rank]:.0%}"
        which = f"the fullest is {what} {number.get(rank, rank)}, with {size} of {cap} ({share})"
        return [f"no {what} is full: {which}{' in the simulated step' if plan.peaks else ''}"]
    listed = ", ".join(map(str, sorted(full)))
    which = f"{what} {listed} is" if len(full) == 1 else f"{what}s {listed} are"
    return [f"{which} full to {FULL:.0%} of the cap or more"]
