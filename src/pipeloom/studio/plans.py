"""A plan on the page: its stages, its cuts between the layers, and what another cap would make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import planning, reports
from ..clusters.names import cpu_cluster
from ..ir.cluster import Cluster
from ..ir.errors import ConfigError, PipeloomError, PlanError
from ..ir.graph import OpGraph
from ..ir.memory_policy import TREATMENTS
from ..ir.plan import Plan, StagePlan
from ..ir.text import as_plain, format_bytes, show_time
from ..plan_request import CapturedModel, settings_of
from ..planner.plan_costs import PlanCosts
from ..planner.search.layer_groups import layer_names
from ..runnable import names_to_plan_by
from ..viewer.html import stages_svg
from ..viewer.picture import memory_panels, pictures
from ..viewer.stage_graph import draw_stages, stage_edges

if TYPE_CHECKING:
    from ..tracer.job import Job

Json: TypeAlias = dict[str, Any]

BY_HAND = "by hand"
"""Stands for the planner of a plan whose cuts were moved."""


@dataclass(frozen=True)
class PlanModel:
    """A plan's model, to simulate its changes.

    captured: with its costs on the devices it was planned for.  described: these, None for processes of this
    machine.
    """

    job: Job
    captured: CapturedModel
    ranks: int
    described: Cluster | None

    @property
    def cluster(self) -> Cluster:
        return self.described or cpu_cluster(self.ranks)

    @property
    def times(self) -> str:
        return "measured on this machine" if self.described is None else "by roofline, for the cluster"

    @cached_property
    def costs(self) -> PlanCosts:
        return PlanCosts(self.captured.graph, self.captured.profiles, self.cluster)

    @classmethod
    def load(cls, job: Job, plan: Plan, cluster: Cluster | None) -> PlanModel:
        """cluster: None for processes of this machine, whose op times are measured within the last day.

        Raises: PlanError if they do not belong together.
        """
        model = cls(job, planning.model_of_plan(job, plan, cluster), plan.ranks, cluster)
        planning.simulate(plan, model.captured.graph, model.captured.profiles, model.cluster)
        return model


@dataclass(frozen=True)
class LayerPiece:
    """A run of ops of one layer in one stage: what a cut cannot go through."""

    layer: str
    ops: tuple[str, ...]
    stage: int


@dataclass(frozen=True)
class Planned:
    """A plan and the model that it is of: None where only the plan's own figures are known."""

    plan: Plan
    model: PlanModel | None

    @cached_property
    def pieces(self) -> list[LayerPiece]:
        return pieces(self.plan, self.model.captured.graph) if self.model else []

    def cut(self, cuts: Sequence[int] | None) -> Plan:
        """The plan whose stages begin at other pieces; None: at its own."""
        if cuts is None or self.model is None or list(cuts) == cuts_of(self.pieces):
            return self.plan
        plan = with_cuts(self.plan, self.pieces, cuts)
        return replace(plan, stages=self.model.costs.figures(plan))


class PlanDesk:
    """Answers about one plan."""

    def __init__(self, plan: Plan, model: PlanModel | None) -> None:
        self._planned = Planned(plan, model)
        self._lock = Lock()
        self._search: Json = {"running": False, "said": "", "plans": 0}

    def plan(self, asked: Json) -> Json:
        """The plan, or that of other cuts: `asked["cuts"]`, before which piece each stage but the first
        begins."""
        planned, cuts = self._planned, asked.get("cuts")
        plan = planned.cut(cuts)
        if planned.model is not None:  # of the devices that its step is simulated on
            plan = replace(plan, stages=planned.model.costs.figures(plan))
        used = {treatment for policy in plan.memory.stages for treatment in policy.values()} - {"keep"}
        answer: Json = {
            "stages": [_treated(stage, number, plan) for number, stage in enumerate(plan.stages)],
            "cap": max(plan.caps, default=0),
            "used": next(name for name, allowed in TREATMENTS.items() if used <= set(allowed)),
            "step": plan.predicted_step_s,
            "peaks": list(plan.peaks),
            "over": [],
        }
        if planned.model is None:
            step_s, times = plan.predicted_step_s, "those of the plan's file"
            return answer | {"said": _sentence(plan, step_s, plan.peaks, times)}
        cuts = cuts_of(planned.pieces) if cuts is None else cuts
        parts = [
            [piece.layer, len(piece.ops), stage]
            for stage, (a, b) in enumerate(pairwise([0, *cuts, len(planned.pieces)]))
            for piece in planned.pieces[a:b]
        ]
        answer |= {"cuts": cuts, "pieces": parts} | _simulated(plan, planned.model)
        said = _sentence(plan, answer["step"], answer["peaks"], planned.model.times)
        return answer | {"said": said}

    def save_plan(self, asked: Json) -> Json:
        """The file of the plan as it is cut now, with its figures."""
        planned = self._planned
        plan = planned.cut(asked.get("cuts"))
        if planned.model is not None:
            timeline = planned.model.costs.simulate(plan)
            plan = replace(plan, predicted_step_s=timeline.step_s, peaks=timeline.rank_peaks)
        return {"file": "plan.json", "json": as_plain(plan)}

    def cap(self, asked: Json) -> Json:
        """Plan again, in the background, for another memory per device."""
        if self._planned.model is None:
            raise ConfigError(
                "a plan alone does not say what ops cost", hint="name its model: pipeloom studio PLAN MODEL"
            )
        memory, treatments = str(asked["memory"]), str(asked["treatments"])
        with self._lock:
            if self._search["running"]:
                raise ConfigError("the planner is at work", hint="wait until it has ended")
            self._search |= {"running": True, "said": f"planning for {memory}"}
        Thread(target=self._plan_again, args=(memory, treatments), daemon=True).start()
        return self._search

    def progress(self, asked: Json) -> Json:
        """running; said: how the search goes on, or how it ended; plans: how many were found."""
        return self._search

    def weighed(self, count: int) -> None:
        self._search["said"] = f"{count} stages weighed"

    def trying(self, what: str, best: tuple[str, float] | None, bound_s: float) -> None:
        so_far = f", best so far {best[0]} with {show_time(best[1])}" if best else ""
        self._search["said"] = f"{what}{so_far}"

    def _plan_again(self, memory: str, treatments: str) -> None:
        old, model = self._planned.plan, self._planned.model
        assert model is not None, "without one nothing is planned"
        said = "the planner failed, which is no fault of yours: see where the studio was started"
        try:
            request = planning.make_request(
                watch=self,
                **settings_of(old) | names_to_plan_by(old),
                cluster=model.described,
                memory=memory,
                treatments=treatments,
            )
            plan, captured = planning.plan_size(request, model.job, captured=model.captured.captured)
            self._planned = Planned(plan, replace(model, captured=captured))
            self._search["plans"] += 1
            said = f"planned for {memory}: step {show_time(plan.predicted_step_s)}"
        except PipeloomError as error:
            said = f"{error.message}\n{error.hint or ''}"
        finally:
            self._search |= {"running": False, "said": said}


def _sentence(plan: Plan, step_s: float, peaks: Sequence[int], times: str) -> str:
    by = plan.planner if plan.planner == BY_HAND else f"by {plan.planner}"
    said = [f"{plan.schedule}, cut {by}", f"step {show_time(step_s)}, times {times}"]
    for name, sizes in (("peaks", peaks), ("caps", plan.caps)):
        if sizes:
            said.append(f"{name} {', '.join(map(format_bytes, sizes))}")
    return "; ".join(said)


def _simulated(plan: Plan, model: PlanModel) -> Json:
    graph, timeline = model.captured.graph, model.costs.simulate(plan)
    rows = reports.stage_rows(graph, plan)
    peaks = timeline.rank_peaks
    over = [rank for rank, cap in enumerate(plan.caps) if peaks[rank] > cap]
    drawn = draw_stages(rows, stage_edges(plan.stage_graph(graph)), (timeline, None))
    return {
        "svg": stages_svg(drawn),
        "rows": as_plain(rows),
        "step": timeline.step_s,
        "peaks": peaks,
        "over": [
            f"rank {r} holds {format_bytes(peaks[r])}, its cap is {format_bytes(plan.caps[r])}" for r in over
        ],
        "pictures": pictures([timeline], reports.explain_steps(plan, graph, [timeline], model.cluster)),
        "memory": memory_panels([timeline], plan.caps),
    }


def pieces(plan: Plan, graph: OpGraph) -> list[LayerPiece]:
    """The model's layers in the order of its ops, where a stage cuts one, in parts; empty where a stage is no
    run of ops, as in a graph of branches."""
    layer_of = layer_names(graph.ops)
    runs = [
        LayerPiece(layer, tuple(op.name for op in ops), stage)
        for (layer, stage), ops in groupby(
            (op for op in graph.ops if op.name in plan.stage_of),
            key=lambda op: (layer_of[op.module] or op.module, plan.stage_of[op.name]),
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
    return replace(plan, stages=stages, memory=policy, planner=BY_HAND, predicted_step_s=0.0, peaks=())


def _treated(stage: StagePlan, number: int, plan: Plan) -> Json:
    times = stage.forward_s, stage.input_grad_s + stage.weight_grad_s, stage.recompute_s
    sizes = stage.kept_bytes, stage.recomputed_bytes, stage.offloaded_bytes
    return {
        "stage": number,
        "rank": plan.placement[number],
        "ops": len(stage.ops),
        "times": [show_time(seconds) if seconds else "" for seconds in times],
        "bytes": sizes,
        "sizes": [format_bytes(size) for size in sizes],
        "treatments": dict(plan.memory.of_stage(number)),
    }
