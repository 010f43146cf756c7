"""A plan on the page: its stages, its cuts between the layers, and what another cap would make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import planning, reports
from ..caches import beside_ranks
from ..clusters.names import cpu_cluster
from ..ir.cluster import Cluster
from ..ir.errors import ConfigError, PipeloomError, PlanError
from ..ir.graph import OpGraph
from ..ir.memory_policy import TREATMENTS
from ..ir.plan import Plan, StagePlan
from ..ir.profile import Profile
from ..ir.text import as_plain, format_bytes, show_time
from ..plan_request import CapturedModel
from ..planner.search.layer_groups import layer_names
from ..viewer.html import stages_svg
from ..viewer.picture import memory_panels, pictures
from ..viewer.stage_graph import draw_stages, stage_edges
from ..viewer.tables import stage_figures

if TYPE_CHECKING:
    from ..tracer.job import Job

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class PlanModel:
    """A plan's model, to simulate its changes.

    costs: on the devices it was planned for.  described: these, None for processes of this machine.
    """

    job: Job
    captured: CapturedModel
    costs: Mapping[str, Profile]
    ranks: int
    described: Cluster | None

    @property
    def cluster(self) -> Cluster:
        return self.described or cpu_cluster(self.ranks)

    @classmethod
    def load(cls, job: Job, plan: Plan, cluster: Cluster | None) -> PlanModel:
        """cluster: None for processes of this machine, whose op times are measured within the last day."""
        captured = planning.captured_model(
            job, plan.microbatch_size, cluster, master_weights=plan.master_weights
        )
        costs, ranks = captured.profiles, len(set(plan.placement))
        if cluster is None:
            costs = {name: beside_ranks(each, captured.graph, ranks) for name, each in costs.items()}
        return cls(job, captured, costs, ranks, cluster)


@dataclass(frozen=True)
class LayerPiece:
    """A run of ops of one layer in one stage: what a cut cannot go through."""

    layer: str
    ops: tuple[str, ...]
    stage: int


class PlanDesk:
    """Answers about one plan. model: None where only the plan's own figures are known."""

    def __init__(self, plan: Plan, model: PlanModel | None) -> None:
        self._plan, self._model = plan, model
        self._pieces = pieces(plan, model.captured.graph) if model else []
        self._lock = Lock()
        self._search: Json = {"running": False, "said": "", "plans": 0}

    def plan(self, asked: Json) -> Json:
        """The plan, or that of other cuts: `asked["cuts"]`, before which piece each stage but the first
        begins."""
        plan, cuts = self._cut(asked)
        used = {treatment for policy in plan.memory.stages for treatment in policy.values()} - {"keep"}
        answer: Json = {
            "stages": [_treated(stage, number, plan) for number, stage in enumerate(plan.stages)],
            "caps": [format_bytes(cap) for cap in plan.caps],
            "cap": max(plan.caps, default=0),
            "planner": plan.planner,
            "used": next(name for name, allowed in TREATMENTS.items() if used <= set(allowed)),
            "schedule": plan.schedule,
            "notes": plan.notes,
            "step": plan.predicted_step_s,
            "peaks": list(plan.peaks),
        }
        if self._model is None:
            return answer
        edges = [0, *cuts, len(self._pieces)]
        parts = [
            [piece.layer, len(piece.ops), stage]
            for stage, (a, b) in enumerate(pairwise(edges))
            for piece in self._pieces[a:b]
        ]
        return answer | {"cuts": cuts, "pieces": parts} | self._simulated(plan, self._model)

    def save_plan(self, asked: Json) -> Json:
        """The file of the plan as it is cut now, with its figures."""
        plan, _ = self._cut(asked)
        if self._model is not None:
            timeline = self._simulate(plan, self._model)
            peaks = tuple(timeline.peak_bytes(rank) for rank in range(timeline.ranks))
            plan = replace(plan, predicted_step_s=timeline.step_s, peaks=peaks)
        return {"file": "plan.json", "json": as_plain(plan)}

    def cap(self, asked: Json) -> Json:
        """Plan again, in the background, for another memory per device."""
        if self._model is None:
            raise ConfigError(
                "a plan alone does not say what ops cost", hint="name its model: pipeloom studio PLAN MODEL"
            )
        memory, treatments = str(asked["memory"]), str(asked["treatments"])
        with self._lock:
            if self._search["running"]:
                raise ConfigError("the planner is at work", hint="wait until it has ended")
            self._search |= {"running": True, "said": f"planning for {memory}"}
        Thread(target=self._plan_again, args=(memory, treatments, self._model), daemon=True).start()
        return self._search

    def progress(self, asked: Json) -> Json:
        """running; said: how the search goes on, or how it ended; plans: how many were found."""
        return self._search

    def weighed(self, count: int) -> None:
        self._search["said"] = f"{count} stages weighed"

    def trying(self, what: str, best: tuple[str, float] | None, bound_s: float) -> None:
        so_far = f", best so far {best[0]} with {show_time(best[1])}" if best else ""
        self._search["said"] = f"{what}{so_far}"

    def _plan_again(self, memory: str, treatments: str, model: PlanModel) -> None:
        old = self._plan
        try:
            request = planning.make_request(
                model.job,
                watch=self,
                ranks=len(set(old.placement)) // old.width,
                replicas=old.width,
                schedule=old.schedule,
                microbatches=old.microbatches,
                microbatch_size=old.microbatch_size,
                weights=old.weights,
                cluster=model.described,
                memory=memory,
                treatments=treatments,
            )
            plan, _ = planning.plan_size(request, model.job, captured=model.captured.captured)
        except PipeloomError as error:
            said = f"{error.message}\n{error.hint or ''}"
        else:
            self._plan, self._pieces = plan, pieces(plan, model.captured.graph)
            self._search["plans"] += 1
            said = f"planned for {memory}: step {show_time(plan.predicted_step_s)}"
        self._search |= {"running": False, "said": said}

    def _cut(self, asked: Json) -> tuple[Plan, list[int]]:
        """The plan with the cuts that are asked for, and these."""
        own = cuts_of(self._pieces)
        cuts = own if asked.get("cuts") is None else [int(cut) for cut in asked["cuts"]]
        return (self._plan if cuts == own else with_cuts(self._plan, self._pieces, cuts)), cuts

    def _simulate(self, plan: Plan, model: PlanModel) -> Any:
        return planning.simulate(plan, model.captured.graph, model.costs, model.cluster)

    def _simulated(self, plan: Plan, model: PlanModel) -> Json:
        graph = model.captured.graph
        timeline = self._simulate(plan, model)
        rows = reports.stage_rows(graph, plan)
        times = stage_figures(rows, (timeline, None))
        texts = {s: [f"F {forward.value}", f"B {back.value}"] for s, (forward, back) in times.items()}
        peaks = [timeline.peak_bytes(rank) for rank in range(timeline.ranks)]
        over = [rank for rank, cap in enumerate(plan.caps) if peaks[rank] > cap]
        drawn = draw_stages(rows, stage_edges(plan.stage_graph(graph)), texts)
        return {
            "svg": stages_svg(drawn),
            "rows": as_plain(rows),
            "step": timeline.step_s,
            "bubble": timeline.bubble,
            "peaks": peaks,
            "over": [
                f"rank {r} holds {format_bytes(peaks[r])}, its cap is {format_bytes(plan.caps[r])}"
                for r in over
            ],
            "pictures": pictures([timeline], reports.explain_steps(plan, graph, [timeline], model.cluster)),
            "memory": memory_panels([timeline], plan.caps),
        }


def pieces(plan: Plan, graph: OpGraph) -> list[LayerPiece]:
    """The model's layers in the order of its ops, where a stage cuts one, in parts; empty where a stage is no
    run of ops, as in a graph of branches."""
    layer_of = layer_names(graph.ops)
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.ops}
    runs = [
        LayerPiece(layer, tuple(op.name for op in ops), stage)
        for (layer, stage), ops in groupby(
            (op for op in graph.ops if op.name in stage_of),
            key=lambda op: (layer_of[op.module] or op.module, stage_of[op.name]),
        )
    ]
    order = [stage for stage, _ in groupby(run.stage for run in runs)]
    return runs if order == list(range(len(plan.stages))) else []


def cuts_of(parts: Sequence[LayerPiece]) -> list[int]:
    return [at for at, (one, other) in enumerate(pairwise(parts), start=1) if one.stage != other.stage]


def with_cuts(plan: Plan, parts: Sequence[LayerPiece], cuts: Sequence[int]) -> Plan:
    """The plan with stages that begin at other pieces. What becomes of a residual goes with the op that makes
    it; figures that are no longer known are 0. Raises: PlanError if a stage would be empty."""
    edges = [0, *cuts, len(parts)]
    if len(edges) != len(plan.stages) + 1 or any(a >= b for a, b in pairwise(edges)):
        raise PlanError(
            f"cuts before the pieces {', '.join(map(str, cuts))} of {len(parts)} leave a stage empty",
            hint=f"make {len(plan.stages)} stages of at least one piece each",
        )
    stages = tuple(
        StagePlan(ops=tuple(op for piece in parts[a:b] for op in piece.ops)) for a, b in pairwise(edges)
    )
    home = {op: s for s, stage in enumerate(stages) for op in stage.ops}
    treatments: list[dict[str, Any]] = [{} for _ in stages]
    for treated in plan.memory.stages:
        for residual, treatment in treated.items():
            treatments[home[residual.partition(".")[0]]][residual] = treatment
    policy = replace(plan.memory, stages=tuple(treatments) if plan.memory.stages else ())
    return replace(plan, stages=stages, memory=policy, planner="by hand", predicted_step_s=0.0, peaks=())


def _treated(stage: StagePlan, number: int, plan: Plan) -> Json:
    return {
        "stage": number,
        "rank": plan.placement[number],
        "ops": len(stage.ops),
        "times": [stage.forward_s, stage.input_grad_s + stage.weight_grad_s, stage.recompute_s],
        "bytes": [stage.kept_bytes, stage.recomputed_bytes, stage.offloaded_bytes],
        "treatments": dict(plan.memory.stages[number]) if number < len(plan.memory.stages) else {},
    }
