"""Per-tensor memory optimisation of one stage: keep, recompute or offload each residual, under a cap.

A solver makes the choice, usually the greedy one (greedy.py). What is dropped is recomputed inside the
backward, each residual in front of the first op that reads it.

Source: DawnPiper's cost-model based memory optimisation (2505.05856), reconstructed from its abstract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ...ir.memory_policy import Treatment
from ..search.evaluation import Evaluation
from ..stage_cost.arrays import Indices
from ..stage_cost.model import CostModel
from ..stage_cost.peak_memory import peak_bytes, peak_terms, static_memory
from ..stage_cost.recompute_liveness import RecomputeLiveness
from ..stage_cost.residuals import OFFLOAD, RECOMPUTE, Residuals, find_residuals
from ..stage_cost.treated_stage import HostCopies, cost_choice, host_copies
from .greedy import TreatmentChoice, TreatmentProblem, choose_greedily

BOTH: tuple[Treatment, ...] = ("recompute", "offload")
Solver = Callable[[TreatmentProblem], TreatmentChoice]


def treat_interval(
    model: CostModel,
    start: int,
    end: int,
    stage: int,
    *,
    in_flight: int,
    cap: float,
    treatments: Sequence[Treatment] = BOTH,
    solve: Solver = choose_greedily,
    ahead: bool = False,
) -> Evaluation:
    """Ops [start, end) as stage `stage` on the rank of that number: the fastest way found to keep its cap.

    in_flight: micro-batches whose residuals it holds.  cap: bytes.  treatments: what may be done.
    ahead: what is recomputed is restored in front of the backward, and all there in it.
    Returns: seconds are inf if no choice fits; peak_bytes is then the least that any reaches.
    """
    row, seconds = model.row(start, np.array([end]))
    footprint, compute_s = row.at(0), float(seconds[model.kind[stage], 0])
    peak = float(peak_bytes(footprint, model.options, in_flight))
    if peak <= cap:
        return Evaluation(seconds=model.turn_of(footprint, compute_s, stage), peak_bytes=peak)
    static = float(sum(static_memory(footprint, model.options, in_flight).values()))
    if static + footprint.step > cap or not treatments:
        return Evaluation(seconds=inf, peak_bytes=peak)
    forward_s, cheap_s = model.forward_s[model.kind[stage], start:end], model.cheap_s[model.kind[stage]]
    residuals = find_residuals(model.sweep, start, end, forward_s, cheap_s, footprint.saved_inputs > 0)
    liveness = RecomputeLiveness(
        sweep=model.sweep,
        start=start,
        end=end,
        residuals=residuals,
        terms=peak_terms(footprint, model.options, in_flight),
        ahead=ahead,
    )
    copies = host_copies(model, stage)
    window_s = float(forward_s.sum())
    freed = in_flight - min(in_flight, model.options.offloaded_at_once)
    problem = _treatment_problem(liveness, copies, window_s, (in_flight, freed), treatments, cap - static)
    solution = solve(problem)
    peak = static + max(solution.peak, footprint.step)
    if solution.fails:
        return Evaluation(seconds=inf, peak_bytes=peak)
    treated = cost_choice(footprint, liveness, solution.choice, copies)
    turn_s = treated.turn_s(model, stage, compute_s, window_s)
    names = _name_treatments(residuals, solution.choice)
    return Evaluation(seconds=turn_s, treatments=names, peak_bytes=peak)


def _treatment_problem(
    liveness: RecomputeLiveness,
    copies: HostCopies | None,
    window_s: float,
    counts: tuple[int, int],
    treatments: Sequence[Treatment],
    allowance: float,
) -> TreatmentProblem:
    """window_s: of the stage's forward, behind which a copy is hidden.  counts: micro-batches in flight, and
    those of them whose offloaded residuals are not on the device."""
    residuals = liveness.residuals
    in_flight, freed = counts
    freed_copies = freed if "offload" in treatments and copies else 0
    hidden, most, s_per_byte = 0.0, 0.0, 0.0
    if freed_copies and copies is not None:
        s_per_byte = max(copies.reload_s_per_byte, copies.offload_s_per_byte) * copies.crowded
        latency_s = max(copies.reload_latency_s, copies.offload_latency_s)
        hidden = max(0.0, window_s - latency_s) / s_per_byte
        most = float(residuals.size.sum())
        if copies.memory_bytes:
            most = min(most, copies.memory_bytes / in_flight)
    may = residuals.may & ("recompute" in treatments)
    return TreatmentProblem(
        moments=liveness,
        allowance=allowance,
        per_offloaded=float(freed_copies),
        hidden=min(hidden, most),
        most=most,
        s_per_byte=s_per_byte,
        may=may.astype(np.int64),
    )


def _name_treatments(residuals: Residuals, choice: Indices) -> dict[str, Treatment]:
    words: dict[int, Treatment] = {RECOMPUTE: "recompute", OFFLOAD: "offload"}
    kinds = zip(residuals.names, choice.tolist(), strict=True)
    return {name: words[kind] for name, kind in kinds if kind in words}


@dataclass(frozen=True)
class TreatedStageEvaluator:
    """Evaluations with memory optimisation, as `evaluation.KeepEverything` without.

    caps, in_flight: bytes, and micro-batches whose residuals are held at the peak, of each stage.
    """

    model: CostModel
    caps: Sequence[int]
    in_flight: Sequence[int]
    treatments: Sequence[Treatment] = BOTH
    solve: Solver = choose_greedily
    ahead: bool = False

    def __call__(self, start: int, end: int, stage: int, /) -> Evaluation:
        return treat_interval(
            self.model,
            start,
            end,
            stage,
            in_flight=self.in_flight[stage],
            cap=self.caps[stage],
            treatments=self.treatments,
            solve=self.solve,
            ahead=self.ahead,
        )
