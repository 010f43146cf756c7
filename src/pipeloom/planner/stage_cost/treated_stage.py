"""What a stage takes and holds if some of its residuals are recomputed or offloaded.

With q micro-batches in flight, of K bytes that are kept, O that are offloaded and R that are recomputed:

    forward      q K + min(q, 3) O           and what is dropped in it, as scratch until its last reader
    backward     q K + min(q, 3) O           and its own scratch: gradients and what is made again, less what
                                             of K, O and that has gone (again.py)

Where a stage recomputes ahead, in an action of its own in front of the backward:

    recompute    q K + min(q, 3) O + R       and the scratch of the ops that run again
    backward     q K + min(q, 3) O + R       and its own scratch, as if everything had been kept

Three copies of O: of the newest micro-batch, of the one before while it is on its way to the host, and of
the one whose backward is next, which is fetched one action ahead.

Nothing waits for an offload, and forwards may follow each other at once: so that copies do not pile up, one
may take no longer than a forward. A reload that takes longer than the forward behind which it is fetched
holds the backward up by the rest; recomputing is added to the other computing. A device has its share of what
its switch can carry if all the others there copy as well. The host has room for all micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...ir.cluster import Cluster, Link
from .interval_sums import Indices
from .liveness import Sweep
from .model import CostModel, Footprint, Moment
from .recompute_liveness import Moments
from .residuals import RECOMPUTE, Residuals, scratch_ahead

COPIES = 3
"""Of an offloaded residual that are on the device at once; see above."""


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Of one device: seconds per byte and latency to the host (away) and back, and bytes there."""

    away_s_per_byte: float
    back_s_per_byte: float
    away_latency_s: float
    back_latency_s: float
    memory_bytes: float

    def away_s(self, size: float) -> float:
        """Seconds of OFFLOAD; 0 for nothing."""
        return self.away_latency_s + size * self.away_s_per_byte if size else 0.0

    def back_s(self, size: float) -> float:
        """Seconds of RELOAD; 0 for nothing."""
        return self.back_latency_s + size * self.back_s_per_byte if size else 0.0


def host_copies(cluster: Cluster, rank: int) -> HostCopies | None:
    """None if the device has no link to the host."""
    device = cluster.devices[rank]
    away, back = device.host_link, device.reload_link
    if away is None or back is None:
        return None
    sharing = sum(other.switch == device.switch for other in cluster.devices)
    uplink = cluster.switches[device.switch] if device.switch is not None else None

    def s_per_byte(link: Link) -> float:
        alone = 1 / link.bandwidth_bytes_per_s
        return alone if uplink is None else max(alone, sharing / uplink.bandwidth_bytes_per_s)

    return HostCopies(
        away_s_per_byte=s_per_byte(away),
        back_s_per_byte=s_per_byte(back),
        away_latency_s=away.latency_s,
        back_latency_s=back.latency_s,
        memory_bytes=float(device.host_memory_bytes),
    )


@dataclass(frozen=True, kw_only=True)
class Treated:
    """One stage with a choice of treatments, for one micro-batch. Bytes and seconds.

    footprint: its transient parts are those with the treatments, where it recomputes inside the backward.
    restored, again: where it recomputes ahead, scratch of the backward, and of RECOMPUTE.
    """

    footprint: Footprint
    offloaded: float
    recomputed: float
    restored: float
    again: float
    recompute_s: float
    offload_s: float
    reload_s: float

    def moments(
        self, model: CostModel, in_flight: int, *, ahead: bool = False
    ) -> tuple[dict[str, float], ...]:
        """Bytes by the kinds of `StageMemory` besides static ones: in forward and backward, and between them
        in recomputing ahead."""
        kept = self.footprint.residuals - self.offloaded - self.recomputed
        held = float(in_flight * kept + min(in_flight, COPIES) * self.offloaded)
        forward, backward = model.moments(self.footprint, in_flight)
        if not (ahead and self.recomputed):
            return _parts(held, forward), _parts(held, backward)
        waiting = float(backward.boundary) - self.footprint.sent_grads - self.footprint.received_grads
        return (
            _parts(held, forward),
            _parts(held + self.recomputed, Moment(waiting, self.again)),
            _parts(held + self.recomputed, Moment(backward.boundary, self.restored)),
        )

    def memory_parts(self, model: CostModel, in_flight: int, *, ahead: bool = False) -> dict[str, float]:
        """Bytes by the kinds of `StageMemory` at the peak."""
        worst = max(self.moments(model, in_flight, ahead=ahead), key=lambda parts: sum(parts.values()))
        worst["transient"] += max(0.0, self.footprint.largest - sum(worst.values()))
        return {k: float(v) for k, v in model.static_parts(self.footprint, in_flight).items()} | worst

    def seconds(self, model: CostModel, rank: int, compute_s: float, forward_s: float) -> float:
        """Time that one micro-batch occupies the stage. compute_s: without treatments."""
        busy = compute_s + self.recompute_s
        if not model.options.overlap:
            return model.turn_of(self.footprint, busy + self.offload_s + self.reload_s, rank)
        turn = model.turn_of(self.footprint, busy + max(0.0, self.reload_s - forward_s), rank)
        return max(turn, self.reload_s)


def _parts(residuals: float, moment: Moment) -> dict[str, float]:
    return {
        "residuals": residuals,
        "boundary": float(moment.boundary),
        "transient": float(moment.transient),
    }


def moments_of(
    model: CostModel,
    footprint: Footprint,
    residuals: Residuals,
    in_flight: int,
    place: tuple[Sweep, int, int],
    *,
    ahead: bool = False,
) -> Moments:
    """The moments of a stage for any choice; place: the sweep, start and end of its ops."""
    sweep, start, end = place
    forward, backward = model.moments(footprint, in_flight)
    sent, returned = footprint.whole, footprint.received_grads
    edges = (
        forward.boundary - sent,
        backward.boundary - returned,
        sent,
        returned,
        in_flight - 1,
        min(in_flight, COPIES) - 1,
    )
    return Moments(
        sweep=sweep,
        start=start,
        end=end,
        residuals=residuals,
        held=float(footprint.residuals),
        edges=tuple(map(float, edges)),
        ahead=ahead,
    )


def treated(
    footprint: Footprint,
    moments: Moments,
    choice: Indices,
    copies: HostCopies | None,
    *,
    ahead: bool = True,
) -> Treated:
    """A stage with a choice.  ahead: whether what recomputing ahead needs is to be known."""
    residuals = moments.residuals
    _, recomputed, offloaded, *_ = moments.sums(choice).tolist()
    again, own = 0.0, footprint
    if recomputed:
        forward, backward = moments.most(choice)
        kept = footprint.residuals - recomputed
        transient: Any = (
            max(0.0, forward - kept - footprint.whole),
            max(0.0, backward - kept - footprint.received_grads),
        )
        inputs = bool((residuals.needs_input & (choice == RECOMPUTE)).any())
        own = replace(footprint, transient=transient, kept=np.maximum(footprint.kept, int(inputs)))
        again = scratch_ahead(moments.sweep, residuals, moments.start, choice) if ahead else 0.0
    return Treated(
        footprint=own,
        offloaded=offloaded,
        recomputed=recomputed,
        again=again,
        restored=float(footprint.transient[1]),
        recompute_s=residuals.recompute_s(choice),
        offload_s=copies.away_s(offloaded) if copies else 0.0,
        reload_s=copies.back_s(offloaded) if copies else 0.0,
    )
