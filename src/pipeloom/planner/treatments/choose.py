"""Per-tensor memory optimisation of one stage: keep, recompute or offload each residual, under a cap.

A solver makes the choice, usually the greedy one (greedy.py). What is dropped is recomputed inside the
backward, each residual in front of the first op that reads it.

Source: DawnPiper's cost-model based memory optimisation (2505.05856), reconstructed from its abstract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from ...ir.errors import PlanError
from ...ir.memory_policy import Treatment
from ..search import Evaluation
from ..stage_cost import (
    COPIES,
    OFFLOAD,
    RECOMPUTE,
    Array,
    CostModel,
    Footprint,
    HostCopies,
    Indices,
    Moments,
    Residuals,
    Sweep,
    Treated,
    choice_of,
    host_copies,
    moments_of,
    residuals_of,
    treated,
)
from .greedy import Found, Task, greedy

BOTH: tuple[Treatment, ...] = ("recompute", "offload")
Solver = Callable[[Task], Found]


def optimise(
    model: CostModel,
    start: int,
    end: int,
    stage: int,
    *,
    in_flight: int,
    cap: float,
    treatments: Sequence[Treatment] = BOTH,
    solve: Solver = greedy,
    ahead: bool = False,
) -> Evaluation:
    """Ops [start, end) as stage `stage` on the rank of that number: the fastest way found to keep its cap.

    in_flight: micro-batches whose residuals it holds.  cap: bytes.  treatments: what may be done.
    ahead: what is recomputed is restored in front of the backward, and all there in it.
    Returns: seconds are inf if no choice fits; peak_bytes is then the least that any reaches.
    """
    footprint, seconds = model.row(start, np.array([end]))
    compute_s = float(seconds[model.kind[stage], 0])
    own = _one(footprint)
    peak = float(model.memory(own, np.array([in_flight]))[0, 0])
    if peak <= cap:
        return Evaluation(seconds=model.turn_of(own, compute_s, stage), peak_bytes=peak)
    fixed = {k: float(v) for k, v in model.static_parts(own, in_flight).items()}
    if sum(fixed.values()) + own.largest > cap or not treatments:
        return Evaluation(seconds=inf, peak_bytes=peak)
    forward = model.forward_s[model.kind[stage], start:end]
    decide = _Stage(
        model=model,
        footprint=own,
        place=(model.sweep, start, end),
        compute_s=compute_s,
        forward_s=forward,
        copies=host_copies(model.cluster, stage),
        rank=stage,
        in_flight=in_flight,
        treatments=tuple(treatments),
        ahead=ahead,
    )
    return decide.under(cap, solve)


def _one(footprint: Footprint) -> Footprint:
    """The footprint of a single interval, as numbers."""
    values: dict[str, Any] = {f.name: getattr(footprint, f.name) for f in fields(footprint)}
    first, second = values.pop("transient")[:, 0]
    return Footprint(
        **{name: float(v[0]) for name, v in values.items()}, transient=(float(first), float(second))
    )


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What is to be decided of one stage."""

    model: CostModel
    footprint: Footprint
    place: tuple[Sweep, int, int]
    compute_s: float
    forward_s: Array
    copies: HostCopies | None
    rank: int
    in_flight: int
    treatments: tuple[Treatment, ...]
    ahead: bool

    @cached_property
    def moments(self) -> Moments:
        besides = self.model.cheap_s[self.model.kind[self.rank]]
        found = residuals_of(*self.place, self.forward_s, besides, self.footprint.kept > 0)
        return moments_of(self.model, self.footprint, found, self.in_flight, self.place, ahead=self.ahead)

    def under(self, cap: float, solve: Solver) -> Evaluation:
        """The evaluation with treatments that keep the cap."""
        static = float(sum(self.model.static_parts(self.footprint, self.in_flight).values()))
        found = solve(self.task(cap - static))
        peak = static + max(found.peak, float(self.footprint.largest))
        if found.fails:
            return Evaluation(seconds=inf, peak_bytes=peak)
        chosen = treated(self.footprint, self.moments, found.choice, self.copies, ahead=False)
        turn = chosen.seconds(self.model, self.rank, self.compute_s, float(self.forward_s.sum()))
        return Evaluation(seconds=turn, treatments=self.named(found.choice), peak_bytes=peak)

    def task(self, allowance: float) -> Task:
        q, copies = self.in_flight, self.copies
        away = q - min(q, COPIES) if "offload" in self.treatments and copies is not None else 0
        hidden, most, s_per_byte = 0.0, 0.0, 0.0
        if away and copies is not None:
            window = float(self.forward_s.sum())
            hidden = max(0.0, window - copies.back_latency_s) / copies.back_s_per_byte
            most = max(0.0, window - copies.away_latency_s) / copies.away_s_per_byte
            if copies.memory_bytes:
                most = min(most, copies.memory_bytes / q)
            s_per_byte = copies.back_s_per_byte
        residuals = self.moments.residuals
        most = min(most, float(residuals.size.sum()))
        may = residuals.may & ("recompute" in self.treatments)
        return Task(
            moments=self.moments,
            allowance=allowance,
            per_offloaded=float(away),
            hidden=min(hidden, most),
            most=most,
            s_per_byte=s_per_byte,
            may=may.astype(np.int64),
        )

    def named(self, choice: Indices) -> dict[str, Treatment]:
        words: dict[int, Treatment] = {RECOMPUTE: "recompute", OFFLOAD: "offload"}
        return {
            name: words[int(kind)]
            for name, kind in zip(self.moments.residuals.names, choice, strict=True)
            if int(kind) in words
        }


@dataclass(frozen=True)
class Optimised:
    """Evaluations with memory optimisation, as `evaluation.KeepEverything` without.

    caps, in_flight: bytes, and micro-batches whose residuals are held at the peak, of each stage.
    """

    model: CostModel
    caps: Sequence[int]
    in_flight: Sequence[int]
    treatments: Sequence[Treatment] = BOTH
    solve: Solver = greedy
    ahead: bool = False

    def __call__(self, start: int, end: int, stage: int, /) -> Evaluation:
        return optimise(
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


def treated_stage(
    model: CostModel,
    footprint: Footprint,
    positions: Sequence[int],
    stage: int,
    treatments: Mapping[str, Treatment],
) -> Treated:
    """A stage of any ops (positions, ascending) with given treatments.

    Raises: PlanError if one of them is of no residual of this stage, or cannot be.
    """
    sweep, start, end = model.sweep.apart(positions)
    forward = model.forward_s[model.kind[stage], list(positions)]
    besides = model.cheap_s[model.kind[stage]]
    residuals = residuals_of(sweep, start, end, forward, besides, footprint.kept > 0)
    copies = host_copies(model.cluster, stage)
    _refuse(residuals, treatments, stage, copies)
    moments = moments_of(model, footprint, residuals, 1, (sweep, start, end))
    return treated(footprint, moments, choice_of(residuals, treatments), copies)


def _refuse(
    residuals: Residuals, treatments: Mapping[str, Treatment], stage: int, copies: HostCopies | None
) -> None:
    """Refuse treatments that this stage cannot have."""
    number = {name: index for index, name in enumerate(residuals.names)}
    for name, treatment in treatments.items():
        if treatment == "keep":
            continue
        if name not in number:
            near = get_close_matches(name, number, n=1)
            raise PlanError(
                f"stage {stage} keeps no residual named {name!r} that could be treated",
                hint=f"did you mean {near[0]}?" if near else "plan again for this model and this cut",
            )
        if treatment == "offload" and copies is None:
            raise PlanError(
                f"stage {stage} offloads {name}, but its device has no link to a host",
                hint="add host_link to the device in the cluster file, or keep it",
            )
        index = number[name]
        if treatment == "recompute" and not residuals.may[index] and not residuals.needs_input[index]:
            raise PlanError(
                f"stage {stage} recomputes {name}, whose chain draws random numbers, depends on a buffer "
                "that changes, or is too long",
                hint="keep or offload it",
            )
