"""Peak memory of a stage: the prediction that every planner, plan and report uses.

    peak = static + max over moments of (residuals + boundary + transient), or static + step

    static       parameters, gradients, optimizer state: each parameter once per stage, tied ones in each
                 stage that reads them; of parameters as many versions as the weight policy keeps. Buffers,
                 and the whole batch, which every rank holds.
    residuals    q K + min(q, c) O with q micro-batches in flight, of each of which the stage keeps K bytes on
                 the device and offloads O (c: `CostOptions.offloaded_at_once`). Of a saved value that the
                 stage received, the receive buffer is kept instead, and the batch is there anyway.
    boundary     receive buffers of the micro-batches in flight and of those posted ahead, and messages on
                 their way out, of values and of gradients.
    transient    what the newest micro-batch needs besides, at its worst op: found by the sweeps over the ops
                 in `liveness.py`, and with recomputation in `recompute_liveness.py`.
    step         scratch of the optimizer's step (`ir.graph.UpdateBytes`).

The moments are the last forward before the first backward, and that backward. Where no receives are posted
any more in that forward, as no micro-batch is left to receive, an earlier forward may hold more: what is kept
of each micro-batch is less than a receive buffer, or what all offload is bounded by c. A stage that
recomputes R bytes inside its backward does so at the backward's moment. One that recomputes ahead, in an
action of its own, has a third moment between the two, and holds R in addition from there to the end of the
backward.

The search for treatments weighs many choices for one stage. It asks `recompute_liveness.peak_of` for the same
peak, less what is static, from the `peak_sums` made here.

Times are in `model.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ...ir.memory_policy import AT_ONCE
from ...ir.weight_policies import FLUSH, WEIGHT_POLICIES
from .tensors import Array, Indices

B = TypeVar("B", float, Array)
"""Bytes: a number for one stage, or an array with one entry per stage."""

Bytes: TypeAlias = float | Array

Count: TypeAlias = int | Indices
"""A number of micro-batches, or a column (counts, 1) of several."""


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What a run will do, as far as time and memory depend on it.

    receive_ahead: receives posted ahead, each with a buffer.  sends_in_flight: messages not yet taken when
        the next one is made; 0 where each is through at once.
    microbatches: per step, of those that the device runs.
    weights: the weight policy, see `ir.weight_policies`.  clips: gradients, by their norm over all ranks.
    width: replicas of the stage, which sum their gradients.  sharing: of those that share out the optimizer's
        state, of which an even share is counted.
    offloaded_at_once: see `MemoryPolicy.at_once`.
    """

    microbatches: int
    receive_ahead: int = 2
    sends_in_flight: int = 1
    weights: str = FLUSH
    clips: bool = False
    width: int = 1
    sharing: int = 1
    offloaded_at_once: int = AT_ONCE

    @property
    def gradient_sets(self) -> int:
        """Without a flush, an update that awaits the norm over all ranks, or sums over replicas, keeps its
        gradients while the next ones are added up."""
        return 2 if (self.clips or self.width > 1) and not WEIGHT_POLICIES[self.weights].flushes else 1

    @property
    def batches(self) -> int:
        """Batches that are alive at once."""
        return 1 if WEIGHT_POLICIES[self.weights].flushes else 2


@dataclass(frozen=True, kw_only=True)
class Footprint(Generic[B]):
    """Bytes of a stage, of values those of one micro-batch.

    parameters: and masters.  gradients: their sums.  buffers: and the whole batch.  state, step: what the
    optimizer keeps, and the scratch of its step.
    residuals: kept on the device.  offloaded, recomputed: those that are not.
    saved_inputs: how many received storages an op saves; with none, receive buffers are free after the
        forward.
    received, received_grads: values that cross in, and their gradients, which go back.
    sent, sent_grads: values that cross out, and their gradients, which come back.
    whole: of the values that cross out those that fill a storage; others are sent as copies, which are there
        beside the storage that they are parts of.
    forward_transient, backward_transient: see the module.
    """

    parameters: B
    gradients: B
    state: B
    buffers: B
    residuals: B
    saved_inputs: B
    received: B
    received_grads: B
    sent: B
    sent_grads: B
    whole: B
    step: B
    forward_transient: B
    backward_transient: B
    offloaded: float = 0.0
    recomputed: float = 0.0

    def at(self, index: int) -> Footprint[float]:
        """That of one stage, as numbers."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Footprint(**{name: float(v[index] if np.ndim(v) else v) for name, v in values.items()})


class RecomputeAhead(NamedTuple):
    """Transient bytes of a stage that recomputes in an action of its own in front of the backward: in that
    action, and in the backward after it."""

    recompute: float
    backward: float


class Moment(NamedTuple):
    """Bytes at one moment of a step, static ones apart."""

    residuals: Bytes
    boundary: Bytes
    transient: Bytes

    @property
    def total(self) -> Bytes:
        return self.residuals + self.boundary + self.transient


def predict_peak_memory(
    footprint: Footprint[Any], options: CostOptions, in_flight: Count, ahead: RecomputeAhead | None = None
) -> dict[str, Bytes]:
    """Bytes of a stage at its worst moment, by the kinds of `ir.plan.StageMemory`; elementwise for arrays.

    in_flight: micro-batches whose residuals are held.  ahead: for a stage that recomputes ahead.
    """
    worst, *later = moments(footprint, options, in_flight, ahead)
    for moment in later:
        higher = np.asarray(moment.total) > worst.total
        worst = Moment(*(np.where(higher, *pair) for pair in zip(moment, worst, strict=True)))
    step = np.maximum(footprint.step - worst.total, 0)
    return {
        **static_memory(footprint, options, in_flight),
        "residuals": worst.residuals,
        "boundary": worst.boundary,
        "transient": worst.transient + step,
    }


def peak_bytes(
    footprint: Footprint[Any], options: CostOptions, in_flight: Count, ahead: RecomputeAhead | None = None
) -> Bytes:
    parts = predict_peak_memory(footprint, options, in_flight, ahead)
    return sum(parts.values(), start=0.0)


def static_memory(footprint: Footprint[Any], options: CostOptions, in_flight: Count) -> dict[str, Bytes]:
    return {
        "parameters": footprint.parameters * WEIGHT_POLICIES[options.weights].copies(in_flight),
        "gradients": footprint.gradients * options.gradient_sets,
        "optimizer": footprint.state / options.sharing,
        "buffers": footprint.buffers,
    }


def moments(
    f: Footprint[Any], options: CostOptions, in_flight: Count, ahead: RecomputeAhead | None = None
) -> tuple[Moment, ...]:
    """The moments when a stage may hold most, see the module."""
    held = in_flight * f.residuals + np.minimum(in_flight, options.offloaded_at_once) * f.offloaded
    forward, backward = boundary_bytes(f, options, in_flight)
    forwards = (Moment(held, forward, f.forward_transient), *_earlier_forwards(f, options, in_flight))
    if ahead is None or not f.recomputed:
        return *forwards, Moment(held, backward, f.backward_transient)
    restored = held + f.recomputed
    return (
        *forwards,
        Moment(restored, backward - f.sent_grads - f.received_grads, ahead.recompute),
        Moment(restored, backward, ahead.backward),
    )


def _earlier_forwards(f: Footprint[Any], options: CostOptions, in_flight: Count) -> Iterator[Moment]:
    """Forwards with fewer micro-batches in flight, but receives posted for more of those to come.

        bytes(q') = q' K + min(q', c) O + (q' or 1) r + min(ahead, m - q') r,   q' = 1 .. q

    is concave in q', with corners at m - ahead and at c, so that these and q itself hold its maximum.
    """
    corners = {options.microbatches - options.receive_ahead, options.offloaded_at_once}
    for corner in sorted(corners):
        if corner < options.microbatches - options.receive_ahead:
            continue
        fewer = np.clip(in_flight, 1, max(1, corner))
        if np.any(fewer < in_flight):
            held = fewer * f.residuals + np.minimum(fewer, options.offloaded_at_once) * f.offloaded
            yield Moment(held, boundary_bytes(f, options, fewer)[0], f.forward_transient)


def boundary_bytes(f: Footprint[Any], options: CostOptions, in_flight: Count) -> tuple[Bytes, Bytes]:
    """Messages and receive buffers: in the newest micro-batch's forward, in the backward after it."""
    ahead, count = options.receive_ahead, options.microbatches
    saved = np.where(np.asarray(f.saved_inputs) > 0, in_flight, 0)  # micro-batches whose inputs are kept
    leaving = options.sends_in_flight * np.maximum(f.sent, f.received_grads)
    posted = np.minimum(ahead, np.maximum(count - in_flight, 0))  # for micro-batches not yet begun
    inputs = (np.maximum(saved, 1) + posted) * f.received
    inputs_later = (saved + posted) * f.received
    return (
        inputs + min(ahead, count) * f.sent_grads + f.sent + leaving,
        inputs_later + min(1 + ahead, count) * f.sent_grads + f.received_grads + leaving,
    )


def peak_sums(footprint: Footprint[float], options: CostOptions, in_flight: int) -> Array:
    """What the peak of a stage depends on besides its levels, nothing treated so far.

    Entries: see `recompute_liveness.HELD`.
    """
    forward, backward = boundary_bytes(footprint, options, in_flight)
    sent, returned = float(footprint.whole), float(footprint.received_grads)
    others = in_flight - 1, min(in_flight, options.offloaded_at_once) - 1
    edges = float(forward) - sent, float(backward) - returned
    return np.array([float(footprint.residuals), 0.0, 0.0, *edges, sent, returned, *others], dtype=np.float64)
