"""A plan in rows that people and programs can read, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..ir.cluster import Cluster
from ..ir.flow import flow_of
from ..ir.graph import OpGraph
from ..ir.plan import Plan, StagePlan
from ..ir.stages import StageGraph
from ..ir.text import format_bytes
from .ask_planners import planners_asked
from .beside_1f1b import slower_than_1f1b
from .candidate import EQUAL_TIMES
from .offload_ratio import copy_loads
from .search.layer_groups import layer_names

FULL = 0.95
"""Share of its cap from which on a stage is called full."""


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage of a plan: what it runs, how long, and what it holds. Times in seconds, of one micro-batch.

    layers: as "h.0 .. 3".  reads: the stages that it reads.  depth: ranks of its longest path to the end.
    Bytes by kind are at the peak; kept, recomputed and offloaded bytes are of one micro-batch's residuals.
    filled: share of its rank's cap, by all that the rank holds in the simulated step where that is known.
    offload_ratio (k), link_use, offloadable_stages (of its rank): what offloading would ask of links, see
    `offload_ratio`; None where a device has no link to a host.
    """

    stage: int
    rank: int
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
    loads = copy_loads(plan, cluster) if cluster is not None else (None,) * len(plan.stages)
    reads, depths = ([], []) if graph is None else reads_and_depths(plan, plan.stage_graph(graph))
    layer_of = {} if graph is None else layer_names(graph.ops)
    for stage, (part, load) in enumerate(zip(plan.stages, loads, strict=True)):
        rank = plan.placement[stage]
        cap = plan.caps[rank] if plan.caps else None
        peak = plan.peaks[rank] if plan.peaks else part.memory.total
        rows.append(
            PlannedStage(
                stage=stage,
                rank=rank,
                node=None if cluster is None else cluster.devices[rank].node,
                ops=len(part.ops),
                first_op=part.ops[0],
                last_op=part.ops[-1],
                layers="" if graph is None else layers_in(part, graph, layer_of),
                reads=reads[stage] if reads else None,
                depth=depths[stage] if depths else None,
                **{name: getattr(part, name) for name in OF_STAGES},
                **{f"{kind}_bytes": size for kind, size in asdict(part.memory).items()},
                peak_bytes=part.memory.total,
                cap_bytes=cap,
                filled=peak / cap if cap else None,
                offload_ratio=load.ratio if load else None,
                link_use=load.utilisation if load else None,
                offloadable_stages=load.offloadable if load else None,
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


def branch_figures(plan: Plan) -> dict[str, dict[str, float]]:
    """What a plan takes whose stages run side by side, and what the best one would whose stages are a chain:
    seconds of the step, bytes of the rank that holds most, stages on the longest path; of the chain also
    seconds as a sequential pipeline, whose stages wait for each other. Empty for a chain."""
    figures: dict[str, dict[str, float]] = {}
    for key, text in plan.notes.items():
        what, _, figure = key.partition(".")
        if what in ("branches", "no_branches"):
            figures.setdefault(what, {})[figure] = float(text)
    return figures


def _gain_of_branches(plan: Plan) -> list[str]:
    if not (figures := branch_figures(plan)):
        return []
    dag, row = figures["branches"], figures["no_branches"]
    handed_on = ""
    if sequential_s := row.get("sequential_step_s"):
        waiting = "as a sequential pipeline, whose stages wait for the one in front,"
        handed_on = f", and {waiting} {sequential_s * 1e3:.4g} ms"
    of_one = f" of one of {plan.width} pipelines, whose gradients are not summed" if plan.width > 1 else ""
    return [
        f"stages side by side{of_one}: {dag['depth']:.0f} deep, a step of {dag['step_s'] * 1e3:.4g} ms, at "
        f"most {format_bytes(int(dag['peak_bytes']))} on a rank; one after another (--no-branches) "
        f"{row['depth']:.0f} deep, {row['step_s'] * 1e3:.4g} ms, {format_bytes(int(row['peak_bytes']))}"
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
    above = f", {times[slowest] / mean - 1:.0%} above the mean" if mean and len(times) > 1 else ""
    said = [f"stage {slowest} is the slowest: {times[slowest] * 1e3:.4g} ms per micro-batch{above}"]
    if part.recompute_s:
        said.append(f"{part.recompute_s * 1e3:.3g} ms of that make residuals again")
    if (waits := times[slowest] - compute - part.recompute_s) > 1e-3 * times[slowest]:
        said.append(f"{waits * 1e3:.3g} ms of that wait for transfers and copies")
    if plan.caps:
        said += _full(plan)
    if EQUAL_TIMES in plan.notes:
        said.append(
            f"the order is that of {plan.schedule} for equal times: ordered by these stages' times, a step "
            "does not repeat or stops"
        )
    return said + slower_than_1f1b(plan) + _gain_of_branches(plan) + _planners(plan)


def _planners(plan: Plan) -> list[str]:
    """What each planner came to, where several were asked."""
    if not (asked := planners_asked(plan)):
        return []
    told = [f"{name} {'has none' if s is None else f'{s * 1e3:.4g} ms'}" for name, s in asked.items()]
    return [f"the fastest plan of several planners: {', '.join(told)}"]


def _full(plan: Plan) -> list[str]:
    """Which ranks are full; stages, where each has a rank of its own."""
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
