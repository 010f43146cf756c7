"""One stage with treatments of its residuals: its part of a plan, and its costs for the simulator.

A copy that takes longer than a forward costs time: an offload holds up the forwards behind it, which wait for
its room (AWAIT), a reload that takes longer than the forward behind which it is fetched the backward;
recomputing is added to the other computing. Copies take what the device's
own link takes: what several devices share is for the simulator to say, which knows when each of them copies.
How much to copy is chosen for the case that all of them do.
The host has room for all micro-batches in flight.

Of memory, only levels are worked out here (`recompute_liveness.py`): `peak_memory.py` makes the peak of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...ir import action
from ...ir.action import STEP, B, F, I, W
from ...ir.costs import StageCost
from ...ir.errors import PlanError, did_you_mean
from ...ir.memory_policy import Treatment
from ...ir.plan import StageMemory, StagePlan
from ...ir.stages import StageGraph
from .liveness import LivenessSweep, SplitBackward
from .model import CostModel
from .peak_memory import Footprint, RecomputeAhead, peak_sums, predict_peak_memory
from .recompute_liveness import (
    RECOMPUTE,
    RecomputeLiveness,
    Residuals,
    encode_treatments,
    find_residuals,
    recompute_ahead_bytes,
)
from .tensors import Indices


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Of one device.

    crowded: how many times as long a byte takes while all devices of its switch copy, at most.
    """

    offload_s_per_byte: float
    reload_s_per_byte: float
    offload_latency_s: float
    reload_latency_s: float
    memory_bytes: float
    crowded: float = 1.0

    def offload_s(self, size: float) -> float:
        return self.offload_latency_s + size * self.offload_s_per_byte if size else 0.0

    def reload_s(self, size: float) -> float:
        return self.reload_latency_s + size * self.reload_s_per_byte if size else 0.0


def host_copies(model: CostModel, stage: int) -> HostCopies | None:
    """None if the stage's device has no link to the host."""
    cluster = model.cluster
    device = cluster.devices[stage]
    offload, reload = device.host_link, device.reload_link
    if offload is None or reload is None:
        return None
    crowded = 1.0
    if device.switch is not None:
        homes = zip(model.ranks, cluster.devices, strict=True)
        sharing = len({rank for rank, other in homes if other.switch == device.switch})
        fastest = max(offload.bandwidth_bytes_per_s, reload.bandwidth_bytes_per_s)
        crowded = max(1.0, sharing * fastest / cluster.switches[device.switch].bandwidth_bytes_per_s)
    return HostCopies(
        offload_s_per_byte=1 / offload.bandwidth_bytes_per_s,
        reload_s_per_byte=1 / reload.bandwidth_bytes_per_s,
        offload_latency_s=offload.latency_s,
        reload_latency_s=reload.latency_s,
        memory_bytes=float(device.host_memory_bytes),
        crowded=crowded,
    )


@dataclass(frozen=True, kw_only=True)
class TreatedStage:
    """One stage with treatments of its residuals, for one micro-batch. Bytes and seconds.

    footprint: with the treatments; its transient bytes are those of recomputing inside the backward.
    ahead: transient bytes if it recomputes ahead.
    """

    footprint: Footprint[float]
    ahead: RecomputeAhead
    recompute_s: float = 0.0
    offload_s: float = 0.0
    reload_s: float = 0.0

    def turn_s(self, model: CostModel, rank: int, compute_s: float, forward_s: float) -> float:
        """Time that one micro-batch occupies the stage. compute_s: without treatments."""
        busy = compute_s + self.recompute_s
        longest = max(self.offload_s, self.reload_s)
        return max(model.turn_of(self.footprint, busy + max(0.0, longest - forward_s), rank), longest)


SMALL_RESIDUAL = 1024
"""Elements of a residual up to which it stays, as with PipeOffload (arXiv 2503.01328)."""


def stage_residuals(
    model: CostModel, positions: Sequence[int], stage: int, *, inputs_kept: bool
) -> tuple[LivenessSweep, int, Residuals]:
    """The residuals of a stage of any ops (positions, ascending), and the sweep in which these are an
    interval, from its start on.  inputs_kept: it keeps what it received for its backward."""
    sweep, start, end = model.tables.sweep.apart(positions)
    kind = model.kind[stage]
    forward_s = model.tables.forward_s[kind, list(positions)]
    return sweep, start, find_residuals(sweep, start, end, forward_s, model.tables.cheap_s[kind], inputs_kept)


def stage_liveness(
    model: CostModel,
    footprint: Footprint[float],
    positions: Sequence[int],
    stage: int,
    *,
    in_flight: int = 1,
    ahead: bool = False,
) -> RecomputeLiveness:
    """The moments of a stage, for any choice of treatments.

    footprint: with everything kept.  in_flight: micro-batches at its peak.  ahead: see `RecomputeLiveness`.
    """
    sweep, start, residuals = stage_residuals(model, positions, stage, inputs_kept=footprint.saved_inputs > 0)
    return RecomputeLiveness(
        sweep=sweep,
        start=start,
        end=start + len(positions),
        residuals=residuals,
        kept_sums=peak_sums(footprint, model.options, in_flight),
        ahead=ahead,
    )


def offload_all(
    model: CostModel, stages: StageGraph, index: int, *, again: bool = True
) -> dict[str, Treatment]:
    """Treatments of a stage whose residuals all leave but the small ones, and, if any may be made `again`,
    those that take less time for that than to copy out and back.

    Source: PipeOffload (arXiv 2503.01328, appendix C), which makes again what is elementwise.
    """
    _, _, residuals = stage_residuals(model, model.positions(stages, index), index, inputs_kept=False)
    copies, again_s = host_copies(model, index), residuals.alone_s
    values, treatments = model.graph.value, dict[str, Treatment]()
    for at, name in enumerate(residuals.names):
        if name in values and prod(values[name].shape) <= SMALL_RESIDUAL:
            continue
        size = float(residuals.size[at])
        cheap = again and copies is not None and again_s[at] < copies.offload_s(size) + copies.reload_s(size)
        treatments[name] = "recompute" if cheap and residuals.may[at] else "offload"
    return treatments


def cost_choice(
    footprint: Footprint[float],
    liveness: RecomputeLiveness,
    choice: Indices,
    copies: HostCopies | None,
    ahead_bytes: float = 0.0,
) -> TreatedStage:
    """A stage with a choice of treatments.

    footprint: of the stage with everything kept.  choice: residual -> `KEEP`, `RECOMPUTE` or `OFFLOAD`.
    copies: None if the device has no link to the host.  ahead_bytes: transient bytes of recomputing ahead.
    """
    residuals = liveness.residuals
    recomputed, offloaded = liveness.freed_bytes(choice).tolist()
    kept = footprint.residuals - recomputed - offloaded
    treated = replace(footprint, residuals=kept, offloaded=offloaded, recomputed=recomputed)
    if recomputed:
        forward, backward = liveness.highest_levels(choice)
        needs_input = bool((residuals.needs_input & (choice == RECOMPUTE)).any())
        treated = replace(
            treated,
            forward_transient=max(0.0, forward - kept - offloaded - footprint.whole),
            backward_transient=max(0.0, backward - kept - offloaded - footprint.received_grads),
            saved_inputs=max(footprint.saved_inputs, int(needs_input)),
        )
    return TreatedStage(
        footprint=treated,
        ahead=RecomputeAhead(ahead_bytes, float(footprint.backward_transient)),
        recompute_s=residuals.recompute_s(choice),
        offload_s=copies.offload_s(offloaded) if copies else 0.0,
        reload_s=copies.reload_s(offloaded) if copies else 0.0,
    )


def _refuse_treatments(
    residuals: Residuals, treatments: Mapping[str, Treatment], stage: int, copies: HostCopies | None
) -> None:
    number = {name: index for index, name in enumerate(residuals.names)}
    for name, treatment in treatments.items():
        index = number.get(name, -1)
        if treatment == "keep":
            continue
        if index < 0:
            raise PlanError(
                f"stage {stage} keeps no residual named {name!r} that could be treated",
                hint=did_you_mean(name, number, "plan again for this model and this cut"),
            )
        if treatment == "offload" and copies is None:
            raise PlanError(
                f"stage {stage} offloads {name}, but its device has no link to a host",
                hint="name a --cluster with host_link (`pipeloom cluster detect --directory FOLDER -o FILE` "
                "measures this machine's), or keep it",
            )
        if treatment == "recompute" and not residuals.may[index] and not residuals.needs_input[index]:
            raise PlanError(
                f"stage {stage} recomputes {name}, whose chain draws random numbers, depends on a buffer "
                "that changes, or is too long",
                hint="keep or offload it",
            )


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """What one stage takes and holds, worked out once; made by `estimate_stage`.

    treated: with its treatments, if it has any.
    """

    model: CostModel
    stages: StageGraph
    index: int
    treated: TreatedStage

    @cached_property
    def seconds(self) -> tuple[float, float, float]:
        """See `CostModel.stage_seconds`."""
        return self.model.stage_seconds(self.stages, self.index)

    @property
    def turn_s(self) -> float:
        """Seconds that one micro-batch occupies the stage."""
        return self.treated.turn_s(self.model, self.index, sum(self.seconds), self.seconds[0])

    @cached_property
    def split_backward(self) -> SplitBackward:
        return self.model.split_backward(self.model.positions(self.stages, self.index))

    def plan(self, in_flight: int, *, ahead: bool = False, turn_s: float = 0.0) -> StagePlan:
        """The stage in a plan.

        in_flight: micro-batches whose residuals it holds at its peak.  ahead: whether it recomputes in front
        of its backward, not inside.  turn_s: see `StagePlan`.
        """
        treated, footprint = self.treated, self.treated.footprint
        forward_s, input_grad_s, weight_grad_s = self.seconds
        scratch = treated.ahead if ahead else None
        parts = predict_peak_memory(footprint, self.model.options, in_flight, scratch)
        return StagePlan(
            ops=self.stages.stages[self.index].ops,
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            recompute_s=treated.recompute_s,
            offload_s=treated.offload_s,
            reload_s=treated.reload_s,
            turn_s=turn_s,
            kept_bytes=round(float(footprint.residuals)),
            recomputed_bytes=round(footprint.recomputed),
            offloaded_bytes=round(footprint.offloaded),
            memory=StageMemory(**{kind: round(float(size)) for kind, size in parts.items()}),
        )

    def simulator_cost(self, plan: StagePlan, *, ahead: bool = False, split: bool = True) -> StageCost:
        """What the simulator needs to know of the stage.

        plan: the stage as `plan` makes it.  ahead: as there; if not, recomputing is part of the backward's
        time and scratch.  split: whether a backward may be split; if none is, what I and W hold is not looked
        at.
        """
        footprint = self.treated.footprint
        scratch = self.treated.ahead if ahead else RecomputeAhead(0.0, footprint.backward_transient)
        backward = round(scratch.backward)
        input_grad, weight_grad = 0, 0
        if split:
            halves = self.split_backward
            input_grad = max(0, round(halves.input_grad - footprint.received_grads))
            weight_grad = round(halves.weight_grad)
        if (
            footprint.recomputed or footprint.offloaded
        ):  # the sweep of the split backward knows nothing of what is recomputed inside it
            input_grad, weight_grad = max(input_grad, backward), max(weight_grad, backward)
        # The optimizer as a memory-bound pass: parameters and states read and written, gradients read.
        bandwidth = self.model.cluster.devices[self.index].memory_bytes_per_s
        moved = 3 * plan.memory.gradients + 2 * plan.memory.optimizer
        inside_s = 0.0 if ahead else plan.recompute_s
        memory, batch = plan.memory, self.model.batch_bytes
        held = footprint.residuals + footprint.offloaded + (footprint.recomputed if ahead else 0.0)
        return StageCost(
            forward_s=plan.forward_s,
            backward_s=plan.input_grad_s + plan.weight_grad_s + inside_s,
            input_grad_s=plan.input_grad_s + inside_s,
            weight_grad_s=plan.weight_grad_s,
            step_s=moved / bandwidth if bandwidth > 0 else 0.0,
            residual_bytes=int(held),
            offloaded_bytes=int(footprint.offloaded),
            recomputed_bytes=int(footprint.recomputed) if ahead else 0,
            recompute_s=plan.recompute_s - inside_s,
            offload_s=plan.offload_s,
            reload_s=plan.reload_s,
            keeps_inputs=bool(footprint.saved_inputs > 0),
            carried_bytes=round(self.split_backward.carried) if split else 0,
            static_bytes={
                "parameters": memory.parameters,
                "gradients": memory.gradients,
                "optimizer": memory.optimizer,
                "buffers": memory.buffers - batch,
                "batch": batch,
            },
            transient_bytes={
                F: round(float(footprint.forward_transient)),
                B: backward,
                I: input_grad,
                W: weight_grad,
                STEP: int(footprint.step),
                action.RECOMPUTE: round(scratch.recompute),
            },
            tied_bytes={
                name: self.model.graph.parameter[name].gradient_bytes
                for name in self.stages.params[self.index]
                if name in self.stages.tied and self.model.graph.parameter[name].trainable
            },
        )


def cost_stage(
    model: CostModel,
    stages: StageGraph,
    index: int,
    treatments: Mapping[str, Treatment],
    in_flight: int,
    *,
    ahead: bool,
    split: bool = True,
) -> StageCost:
    """What the simulator needs to know of one stage. Raises: as `estimate_stage`."""
    estimate = estimate_stage(model, stages, index, treatments)
    return estimate.simulator_cost(estimate.plan(in_flight, ahead=ahead), ahead=ahead, split=split)


def estimate_stage(
    model: CostModel, stages: StageGraph, index: int, treatments: Mapping[str, Treatment] | None = None
) -> StageEstimate:
    """One stage of any cut.  treatments: of its residuals, by their names; those not named are kept.

    Raises: PlanError if a name is not that of a residual of the stage that planners know, or the residual
    cannot be treated so.
    """
    kept = model.stage_footprint(stages, index)
    treated = TreatedStage(footprint=kept, ahead=RecomputeAhead(0.0, kept.backward_transient))
    if treatments and any(treatment != "keep" for treatment in treatments.values()):
        liveness = stage_liveness(model, kept, model.positions(stages, index), index)
        copies = host_copies(model, index)
        _refuse_treatments(liveness.residuals, treatments, index, copies)
        choice = encode_treatments(liveness.residuals, treatments)
        treated = cost_choice(kept, liveness, choice, copies, recompute_ahead_bytes(liveness, choice))
    return StageEstimate(model=model, stages=stages, index=index, treated=treated)
