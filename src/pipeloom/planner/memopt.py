"""Per-tensor memory optimisation of one stage: keep, recompute or offload each residual, under a cap.

The backward's moment is linear in the choice, so the bytes to be freed are a number, and a choice is the
greedy one (memopt_greedy) or the best (memopt_exact). Then the stage is swept again with it: where the
forward or the recomputation has become the worst moment, more is freed, until all are under the cap.

Source: DawnPiper's cost-model based memory optimisation (2505.05856), reconstructed from its abstract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from math import inf
from typing import Any, Literal

import numpy as np

from ..ir.errors import PlanError
from ..ir.memory import Treatment
from .cost import CostModel, Footprint
from .evaluation import Evaluation
from .intervals import Array, Indices
from .memopt_exact import exact
from .memopt_greedy import Task, greedy
from .residuals import KEEP, OFFLOAD, RECOMPUTE, Residuals, choice_of, residuals_of
from .sweep import Sweep
from .treated import COPIES, HostCopies, Treated, host_copies, treated

Method = Literal["greedy", "exact"]
BOTH: tuple[Treatment, ...] = ("recompute", "offload")
ROUNDS = 6
"""Times that more is freed because another moment has become the worst."""

Solver = Callable[[Residuals, Task], Indices | None]
_SOLVERS: dict[str, Solver] = {"greedy": greedy, "exact": exact}


def optimise(
    model: CostModel, start: int, end: int, stage: int, *,
    in_flight: int, cap: float, treatments: Sequence[Treatment] = BOTH,
    method: Method | Solver = "greedy",
) -> Evaluation:  # fmt: skip
    """Ops [start, end) as stage `stage` on the rank of that number: the fastest way found to keep its cap.

    in_flight: micro-batches whose residuals it holds.  cap: bytes.  treatments: what may be done.
    Returns: seconds are inf if no choice fits; peak_bytes is then the least that any reaches.
    """
    footprint, seconds = model.row(start, np.array([end]))
    compute_s = float(seconds[model.kind[stage], 0])
    own = _one(footprint)
    peak = float(model.memory(own, np.array([in_flight]))[0, 0])
    if peak <= cap:
        return Evaluation(seconds=model.turn_of(own, compute_s, stage), peak_bytes=peak)
    fixed = {k: float(v) for k, v in model.static_parts(own, in_flight).items()}
    if sum(fixed.values()) > cap or not treatments:
        return Evaluation(seconds=inf, peak_bytes=peak)
    forward = model.forward_s[model.kind[stage], start:end]
    decide = _Stage(
        model=model, footprint=own, place=(model.sweep, start, end), compute_s=compute_s, forward_s=forward,
        copies=host_copies(model.cluster, stage), rank=stage, in_flight=in_flight,
        treatments=tuple(treatments),
    )  # fmt: skip
    return decide.under(cap, _SOLVERS[method] if isinstance(method, str) else method)


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

    @cached_property
    def residuals(self) -> Residuals:
        besides = self.model.cheap_s[self.model.kind[self.rank]]
        return residuals_of(*self.place, self.forward_s, besides, self.footprint.kept > 0)

    def under(self, cap: float, solve: Callable[[Residuals, Task], Indices | None]) -> Evaluation:
        """The evaluation with treatments that keep the cap."""
        static = float(sum(self.model.static_parts(self.footprint, self.in_flight).values()))
        choice = np.zeros(len(self.residuals), np.int64)
        need, raised = 0.0, -1
        for _ in range(ROUNDS):
            levels = self.levels(choice)
            if max(levels) + static <= cap:
                break
            need += max(levels) + static - cap
            only_forward = self.in_flight == 1 and levels[-1] + static <= cap
            task = self.task(need, only_forward=only_forward)
            better, raised = solve(self.residuals, task), raised + 1
            if better is None:
                choice, raised = self.everything(task), raised + 1
                break
            choice = better
        peak = max(self.levels(choice)) + static
        if peak > cap:
            return Evaluation(seconds=inf, peak_bytes=peak)
        if raised > 0:
            choice = self.pruned(choice, cap - static)
        turn = self.with_choice(choice).seconds(
            self.model, self.rank, self.compute_s, float(self.forward_s.sum())
        )
        return Evaluation(
            seconds=turn, treatments=self.named(choice), peak_bytes=max(self.levels(choice)) + static
        )

    def levels(self, choice: Indices) -> list[float]:
        """Bytes besides static ones at each moment; the backward's last."""
        moments = self.with_choice(choice).moments(self.model, self.in_flight)
        return [sum(parts.values()) for parts in moments]

    def pruned(self, choice: Indices, allowance: float) -> Indices:
        """Without what is not needed, the dearest first. Sweeps once per treated residual."""
        alone = np.array([self.residuals.recompute_s(_only(choice, k)) for k in range(len(choice))])
        for k in np.argsort(-alone, kind="stable"):
            if choice[k] != KEEP:
                fewer = choice.copy()
                fewer[k] = KEEP
                if max(self.levels(fewer)) <= allowance:
                    choice = fewer
        return choice

    def with_choice(self, choice: Indices) -> Treated:
        return treated(self.footprint, self.residuals, choice, self.copies, self.place)

    def task(self, need: float, *, only_forward: bool) -> Task:
        """only_forward: with one micro-batch in flight the forward is over, where what it drops is gone."""
        q, copies = self.in_flight, self.copies
        away = q - min(q, COPIES) if "offload" in self.treatments and copies is not None else 0
        again = (1 if only_forward else q - 1) if "recompute" in self.treatments else 0
        hidden, most, s_per_byte = 0.0, 0.0, 0.0
        if away and copies is not None:
            window = float(self.forward_s.sum())
            hidden = max(0.0, window - copies.back_latency_s) / copies.back_s_per_byte
            most = max(0.0, window - copies.away_latency_s) / copies.away_s_per_byte
            if copies.memory_bytes:
                most = min(most, copies.memory_bytes / q)
            s_per_byte = copies.back_s_per_byte
        most = min(most, float(self.residuals.size.sum()))
        return Task(
            need=need, per_recomputed=float(again), per_offloaded=float(away), hidden=min(hidden, most),
            most=most, s_per_byte=s_per_byte, may=self.residuals.may.astype(np.int64),
        )  # fmt: skip

    def everything(self, task: Task) -> Indices:
        """As much treated as can be: offloaded what cannot be made again, while there is room for it."""
        sizes = self.residuals.size
        choice = np.where((task.may > 0) & (task.per_recomputed > 0), RECOMPUTE, KEEP).astype(np.int64)
        left = task.most if task.per_offloaded > 0 else 0.0
        for k in np.argsort(sizes, kind="stable"):
            if choice[k] == KEEP and sizes[k] <= left:
                choice[k] = OFFLOAD
                left -= sizes[k]
        return choice

    def named(self, choice: Indices) -> dict[str, Treatment]:
        words: dict[int, Treatment] = {RECOMPUTE: "recompute", OFFLOAD: "offload"}
        return {
            name: words[int(kind)]
            for name, kind in zip(self.residuals.names, choice, strict=True)
            if int(kind) in words
        }


def _only(choice: Indices, k: int) -> Indices:
    """A choice in which no other residual than k is treated."""
    found = np.zeros_like(choice)
    found[k] = choice[k]
    return found


@dataclass(frozen=True)
class Optimised:
    """Evaluations with memory optimisation, as `evaluation.KeepEverything` without.

    caps, in_flight: bytes, and micro-batches whose residuals are held at the peak, of each stage.
    """

    model: CostModel
    caps: Sequence[int]
    in_flight: Sequence[int]
    treatments: Sequence[Treatment] = BOTH
    method: Method | Solver = "greedy"

    def __call__(self, start: int, end: int, stage: int, /) -> Evaluation:
        return optimise(
            self.model, start, end, stage, in_flight=self.in_flight[stage], cap=self.caps[stage],
            treatments=self.treatments, method=self.method,
        )  # fmt: skip


def treated_stage(
    model: CostModel, footprint: Footprint, positions: Sequence[int], stage: int,
    treatments: Mapping[str, Treatment],
) -> Treated:  # fmt: skip
    """A stage of any ops (positions, ascending) with given treatments.

    Raises: PlanError if one of them is of no residual of this stage, or cannot be.
    """
    sweep, start, end = model.sweep.apart(positions)
    forward = model.forward_s[model.kind[stage], list(positions)]
    besides = model.cheap_s[model.kind[stage]]
    residuals = residuals_of(sweep, start, end, forward, besides, footprint.kept > 0)
    copies = host_copies(model.cluster, stage)
    _refuse(residuals, treatments, stage, copies)
    choice = choice_of(residuals, treatments)
    return treated(footprint, residuals, choice, copies, (sweep, start, end))


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
