"""Memory optimisation of one stage: keep, recompute or offload each residual, under a cap.

A solver makes the choice, usually tensor by tensor (greedy.py). What is dropped is recomputed inside the
backward, each residual in front of the first op that reads it.

Source: DawnPiper's cost-model based memory optimisation (2505.05856), reconstructed from its abstract.

Planners of layer granularity choose treatments of whole layers instead:

    1. Offload whole layers, the largest first, while their copies hide behind the stage's computing.
    2. Then, layer by layer, recompute or offload all that may be, by bytes freed at the peak per second that
       it costs.

No layer is treated in part, and none is spared once it is no longer needed: that is the contrast with the
choice per tensor. A layer that is recomputed keeps what later layers read of it: it is made again from what
the layer before has left, inside the backward like everything that is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

import numpy as np

from ...ir.memory_policy import Treatment
from ..stage_cost.model import CostModel
from ..stage_cost.peak_memory import peak_bytes, static_memory
from ..stage_cost.recompute_liveness import KEEP, NAMES, OFFLOAD, RECOMPUTE
from ..stage_cost.stage_estimate import cost_choice, host_copies, stage_liveness
from ..stage_cost.tensors import Indices
from .greedy import Solver, TreatmentChoice, TreatmentProblem, choose_greedily, seconds_of


def choose_by_layers(layer_of: Sequence[int]) -> Solver:
    """A solver. layer_of: op, by its position -> number of its layer, -1 for none."""
    number = np.array([*layer_of, -1])

    def solve(task: TreatmentProblem) -> TreatmentChoice:
        residuals, peak = task.moments.residuals, task.moments.peak
        made, last_in, _ = task.moments.lives
        own, read = number[made], number[np.where(last_in < 0, made, last_in)]
        inner = (own == read) & (task.may > 0)
        layers = [np.flatnonzero(own == layer) for layer in np.unique(own[own >= 0])]
        choice = np.full(len(residuals), KEEP, dtype=np.int64)
        level = peak(choice)
        for layer in sorted(layers, key=lambda layer: -residuals.size[layer].sum()):
            after = _treated(choice, layer, OFFLOAD)
            if task.per_offloaded and level > task.allowance and _away(task, after) <= task.hidden:
                choice, level = after, peak(after)
        while level > task.allowance:
            before_s, most, best = seconds_of(task, choice), 0.0, None
            for layer in layers:
                if (choice[layer] != KEEP).any():
                    continue
                ways = [_treated(choice, layer[inner[layer]], RECOMPUTE)] if inner[layer].any() else []
                after = _treated(choice, layer, OFFLOAD)
                if task.per_offloaded and _away(task, after) <= task.most:
                    ways.append(after)
                for way in ways:  # bytes freed at the peak per second that it costs
                    seconds, freed = seconds_of(task, way) - before_s, level - peak(way)
                    worth = freed / seconds if seconds > 0 else freed * np.inf if freed > 0 else 0.0
                    if worth > most:
                        most, best = worth, way
            if best is None:
                return TreatmentChoice(True, before_s, level, choice)
            choice, level = best, peak(best)
        return TreatmentChoice(False, seconds_of(task, choice), level, choice)

    return solve


def _treated(choice: Indices, which: Indices, treatment: int) -> Indices:
    found = choice.copy()
    found[which] = treatment
    return found


def _away(task: TreatmentProblem, choice: Indices) -> float:
    return float(task.moments.residuals.size[choice == OFFLOAD].sum())


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Of one interval of ops as a stage.

    seconds: time that one micro-batch occupies the stage, exposed recomputation and transfers included; inf
        if it does not fit.
    treatments: residual -> what becomes of it; those not named are kept.
    peak_bytes: with these treatments; of what does not fit, the least that was reached.
    """

    seconds: float
    treatments: Mapping[str, Treatment] = field(default_factory=dict)
    peak_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        return self.seconds < inf


Evaluator: TypeAlias = Callable[[int, int, int], Evaluation]
"""Ops [start, end) as a stage -> their evaluation. Asking again costs nothing."""

Known: TypeAlias = dict[Hashable, dict[tuple[int, int], Evaluation]]
"""All that a stage's evaluation depends on besides its ops -> (start, end) -> it."""


def treat_interval(
    model: CostModel,
    start: int,
    end: int,
    stage: int,
    *,
    in_flight: int,
    cap: float,
    treatments: Sequence[Treatment] = ("recompute", "offload"),
    solve: Solver = choose_greedily,
    ahead: bool = False,
) -> Evaluation:
    """Ops [start, end) as stage `stage` on the rank of that number: the fastest way found to keep its cap.

    in_flight: micro-batches whose residuals it holds.  cap: bytes.  treatments: what may be done.
    ahead: what is recomputed is restored in front of the backward, and all there in it.
    Returns: seconds are inf if no choice fits; peak_bytes is then the least that any reaches.
    """
    footprint, seconds = model.interval(start, end)
    compute_s = seconds[model.kind[stage]]
    peak = float(peak_bytes(footprint, model.options, in_flight))
    if peak <= cap:
        return Evaluation(seconds=model.turn_of(footprint, compute_s, stage), peak_bytes=peak)
    static = float(sum(static_memory(footprint, model.options, in_flight).values()))
    if static + footprint.step > cap or not treatments:
        return Evaluation(seconds=inf, peak_bytes=peak)
    liveness = stage_liveness(model, footprint, range(start, end), stage, in_flight=in_flight, ahead=ahead)
    residuals, copies = liveness.residuals, host_copies(model, stage)
    # A copy hides behind the stage's forward; freed: copies that an offloaded residual has not on the device.
    window_s = float(residuals.seconds.sum())
    freed, hidden, most, s_per_byte = 0, 0.0, 0.0, 0.0
    if "offload" in treatments and copies is not None:
        freed = in_flight - min(in_flight, model.options.offloaded_at_once)
    if freed and copies is not None:
        s_per_byte = max(copies.reload_s_per_byte, copies.offload_s_per_byte) * copies.crowded
        latency_s = max(copies.reload_latency_s, copies.offload_latency_s)
        hidden = max(0.0, window_s - latency_s) / s_per_byte
        most = float(residuals.size.sum())
        if copies.memory_bytes:
            most = min(most, copies.memory_bytes / in_flight)
    solution = solve(
        TreatmentProblem(
            moments=liveness,
            allowance=cap - static,
            per_offloaded=float(freed),
            hidden=min(hidden, most),
            most=most,
            s_per_byte=s_per_byte,
            may=(residuals.may & ("recompute" in treatments)).astype(np.int64),
        )
    )
    peak = static + max(solution.peak, footprint.step)
    if solution.fails:
        return Evaluation(seconds=inf, peak_bytes=peak)
    treated = cost_choice(footprint, liveness, solution.choice, copies)
    kinds = zip(residuals.names, solution.choice.tolist(), strict=True)
    return Evaluation(
        seconds=treated.turn_s(model, stage, compute_s, window_s),
        treatments={name: NAMES[kind] for name, kind in kinds if kind != KEEP},
        peak_bytes=peak,
    )
