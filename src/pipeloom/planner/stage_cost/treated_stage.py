"""What a stage takes and holds if some of its residuals are recomputed or offloaded.

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
from difflib import get_close_matches
from math import prod

from ...ir.errors import PlanError
from ...ir.memory_policy import Treatment
from ...ir.stages import StageGraph
from .arrays import Indices
from .model import CostModel
from .peak_memory import Footprint, RecomputeAhead, peak_terms
from .recompute_liveness import RecomputeLiveness
from .residuals import RECOMPUTE, Residuals, encode_treatments, find_residuals, recompute_ahead_bytes


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Of one device: seconds per byte and latency of copies to the host and back, and bytes there.

    crowded: how many times as long a byte takes while all devices of its switch copy, at most.
    """

    offload_s_per_byte: float
    reload_s_per_byte: float
    offload_latency_s: float
    reload_latency_s: float
    memory_bytes: float
    crowded: float = 1.0

    def offload_s(self, size: float) -> float:
        """Seconds of OFFLOAD; 0 for nothing."""
        return self.offload_latency_s + size * self.offload_s_per_byte if size else 0.0

    def reload_s(self, size: float) -> float:
        """Seconds of RELOAD; 0 for nothing."""
        return self.reload_latency_s + size * self.reload_s_per_byte if size else 0.0


def host_copies(model: CostModel, stage: int) -> HostCopies | None:
    """Those of a stage's device; None if it has no link to the host."""
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
    recompute_s: float
    offload_s: float
    reload_s: float

    def turn_s(self, model: CostModel, rank: int, compute_s: float, forward_s: float) -> float:
        """Time that one micro-batch occupies the stage. compute_s: without treatments."""
        busy = compute_s + self.recompute_s
        if not model.options.overlap:
            return model.turn_of(self.footprint, busy + self.offload_s + self.reload_s, rank)
        longest = max(self.offload_s, self.reload_s)
        return max(model.turn_of(self.footprint, busy + max(0.0, longest - forward_s), rank), longest)


SMALL = 1024
"""Elements of a residual up to which it stays, as with PipeOffload (arXiv 2503.01328)."""


def offload_all(
    model: CostModel, stages: StageGraph, index: int, *, again: bool = True
) -> dict[str, Treatment]:
    """Treatments of a stage whose residuals all leave but the small ones, and, if any may be made `again`,
    those that take less time for that than to copy out and back. What random ops have drawn is never made
    again, so that their masks leave.

    Source: PipeOffload (arXiv 2503.01328, appendix C), which makes again what is elementwise.
    """
    positions = model.positions(stages, index)
    sweep, start, end = model.sweep.apart(positions)
    forward_s = model.forward_s[model.kind[index], list(positions)]
    residuals = find_residuals(sweep, start, end, forward_s, model.cheap_s[model.kind[index]], False)
    copies, again_s = host_copies(model, index), residuals.alone_s
    values, treatments = model.graph.value, dict[str, Treatment]()
    for at, name in enumerate(residuals.names):
        if name in values and prod(values[name].shape) <= SMALL:
            continue
        size = float(residuals.size[at])
        cheap = again and copies is not None and again_s[at] < copies.offload_s(size) + copies.reload_s(size)
        treatments[name] = "recompute" if cheap and residuals.may[at] else "offload"
    return treatments


def cost_treatments(
    model: CostModel,
    footprint: Footprint[float],
    positions: Sequence[int],
    stage: int,
    treatments: Mapping[str, Treatment],
) -> TreatedStage:
    """A stage of any ops (positions, ascending) with these treatments of its residuals, by their names.

    footprint: of the stage with everything kept.
    Raises: PlanError if one of them is of no residual of this stage, or cannot be.
    """
    sweep, start, end = model.sweep.apart(positions)
    forward_s = model.forward_s[model.kind[stage], list(positions)]
    cheap_s = model.cheap_s[model.kind[stage]]
    residuals = find_residuals(sweep, start, end, forward_s, cheap_s, footprint.saved_inputs > 0)
    copies = host_copies(model, stage)
    _refuse_treatments(residuals, treatments, stage, copies)
    liveness = RecomputeLiveness(
        sweep=sweep, start=start, end=end, residuals=residuals, terms=peak_terms(footprint, model.options, 1)
    )
    choice = encode_treatments(residuals, treatments)
    return cost_choice(
        footprint, liveness, choice, copies, recompute_ahead_bytes(sweep, residuals, start, choice)
    )


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
