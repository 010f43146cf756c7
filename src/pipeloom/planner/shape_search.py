"""The shape of a training run in closed form: width, depth, rows per micro-batch, recomputation.

The model is cut into d stages of equal block count, each replicated w times; micro-batches of b rows, of
which a step of B rows has m = B / (w b) per pipeline. All (w, d, b, recompute) with w d <= devices count.

    seconds of a stage    c C_i + P_i    C_i: forward and backward, c adds the forward again where it is
                                         recomputed;  P_i: what crosses its edges, there and back, not hidden
    exchange              R_i            the ring sum of a stage's gradients over its replicas
    optimizer             O_i            parameters and states moved through the device's memory

    2bw                   t = max_i max(c C_i + P_i + O_i / m, R_i / m)          a micro-batch takes t, m >= d
    flush, gpipe          t_batch = (m + d - 1) max_i(c C_i + P_i) + max_i R_i + max_i O_i
    one by one            t_batch = m sum_i(c C_i + P_i) + max_i R_i + max_i O_i    one micro-batch at a time

    bytes of a stage      v W + G + S + q (A_tot + A_in)         everything kept
                          v W + G + S + A_tot + q A_in           recomputed
                          with v versions of parameters W, gradients G, optimizer state S, q in flight

Where d does not divide the blocks, all stages count as those that have one more.

Source: PipeDream-2BW (arXiv 2006.09503), section 3.4, for t with 2bw and for W and A. Its formulas leave out
G, S and O, the front and the rear of the model, and the time of schedules that flush; these are added here.
As there, q is d for the first stage; for the last, which holds the rear, it is 1 (m with gpipe). Rear and
front are never recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError, PlanError
from ..ir.text import format_bytes
from .block_costs import BlockCosts, PieceCost
from .stage_cost.arrays import Array, Indices
from .wide_links import WideLinks, wide_links


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """width: pipelines side by side.  depth: stages of each.  microbatch_size: rows.
    recompute: whether stages keep their inputs only, and run their forward again."""

    width: int
    depth: int
    microbatch_size: int
    recompute: bool

    def microbatches(self, global_batch: int) -> int:
        """Per step and pipeline.

        >>> PipelineShape(width=2, depth=4, microbatch_size=8, recompute=False).microbatches(128)
        8
        """
        return global_batch // (self.width * self.microbatch_size)


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """How micro-batches follow each other.

    versions: of the parameters.  drains: between steps; if not, the next step's batch is alive too, gradients
        are summed over replicas while the next ones are made, and m must be at least d.
    overlaps: whether several micro-batches are under way.
    first, last: (micro-batches per step, depth) -> most in flight on the first and on the last stage.
    """

    versions: int
    drains: bool
    overlaps: bool
    first: Callable[[Any, Any], Any]
    last: Callable[[Any, Any], Any]


PIPELININGS: dict[str, Pipelining] = {
    "2bw": Pipelining(
        versions=2, drains=False, overlaps=True, first=lambda m, d: d, last=lambda m, d: np.ones_like(m)
    ),
    "flush": Pipelining(
        versions=1, drains=True, overlaps=True, first=np.minimum, last=lambda m, d: np.ones_like(m)
    ),
    "gpipe": Pipelining(versions=1, drains=True, overlaps=True, first=lambda m, d: m, last=lambda m, d: m),
    "one by one": Pipelining(
        versions=1,
        drains=True,
        overlaps=False,
        first=lambda m, d: np.ones_like(m),
        last=lambda m, d: np.ones_like(m),
    ),
}
"""By name; `flush` is 1F1B, "one by one" inter-layer model parallelism without a pipeline."""


@dataclass(frozen=True, kw_only=True)
class ShapeRequest:
    """What a shape is chosen for.

    cluster: of devices that are alike.  global_batch: rows per step, of all pipelines.
    pipelining: a name of `PIPELININGS`.  optimizer_bytes: of state per byte of trained parameters.
    recompute: what is allowed.
    Raises: PlanError if devices differ, or the batch has no rows.
    """

    costs: BlockCosts
    cluster: Cluster
    global_batch: int
    pipelining: str = "2bw"
    optimizer_bytes: float = 2.0
    recompute: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        refuse_unlike_devices(self.cluster)
        if self.global_batch < 1:
            raise PlanError(f"a global batch of {self.global_batch} rows", hint="use at least 1")

    @property
    def rule(self) -> Pipelining:
        return PIPELININGS[self.pipelining]

    @cached_property
    def links(self) -> WideLinks:
        return wide_links(self.cluster)

    @property
    def cap_bytes(self) -> int:
        return min(device.memory_bytes for device in self.cluster.devices)


def refuse_unlike_devices(cluster: Cluster) -> None:
    """Raises: PlanError if the devices of a cluster differ: pipelines side by side are to be equal."""
    kinds = sorted({device.name for device in cluster.devices})
    if len(kinds) > 1:
        raise PlanError(
            f"a shape is chosen for devices that are alike, the cluster has {', '.join(kinds)}",
            hint="name one kind of device, or say how many --ranks there are to be",
        )


class _Shapes(NamedTuple):
    """Many shapes, one array per field of `PipelineShape`, and their micro-batches per step and pipeline."""

    width: Indices
    depth: Indices
    rows: Indices
    recompute: Array
    microbatches: Indices

    def at(self, index: int) -> PipelineShape:
        return PipelineShape(
            width=int(self.width[index]),
            depth=int(self.depth[index]),
            microbatch_size=int(self.rows[index]),
            recompute=bool(self.recompute[index]),
        )


class RankedShape(NamedTuple):
    """rows_per_s: of all pipelines.  peak_bytes: of the fullest stage."""

    shape: PipelineShape
    rows_per_s: float
    peak_bytes: float


def best_shape_closed_form(request: ShapeRequest) -> PipelineShape:
    """The fastest shape that fits; of equally fast ones that with fewer devices, then with fewer bytes.

    Raises: InfeasibleError if none fits.
    """
    return rank_shapes(request)[0].shape


def rank_shapes(request: ShapeRequest, *, slack: float = 1.0) -> list[RankedShape]:
    """All shapes that fit, the fastest first.

    slack: shapes that need up to this many times the devices' memory are among them.
    Raises: InfeasibleError if there is none.
    """
    shapes = _all_shapes(request)
    rates, peaks = _throughput(request, shapes), _memory(request, shapes)
    least = int(np.argmin(peaks))
    (fitting,) = np.nonzero(peaks <= request.cap_bytes * slack)
    if not len(fitting):
        best = shapes.at(least)
        raise InfeasibleError(
            f"no shape fits: even {best.width} pipelines of {best.depth} stages, micro-batches of "
            f"{best.microbatch_size} rows{', recomputed' if best.recompute else ''}, need "
            f"{format_bytes(float(peaks[least]))} on a device, its cap is {format_bytes(request.cap_bytes)}",
            hint="use more devices, or devices with more memory",
        )
    devices = (shapes.width * shapes.depth)[fitting]
    order = fitting[np.lexsort((peaks[fitting], devices, -rates[fitting]))]
    return [RankedShape(shapes.at(i), float(rates[i]), float(peaks[i])) for i in order.tolist()]


def throughput(request: ShapeRequest, shape: PipelineShape) -> float:
    """Rows per second of all pipelines of a shape, see the module."""
    return float(_throughput(request, _one(request, shape))[0])


def memory(request: ShapeRequest, shape: PipelineShape) -> float:
    """Bytes of its fullest stage, see the module."""
    return float(_memory(request, _one(request, shape))[0])


def divisors(whole: int) -> list[int]:
    """All that divide a batch, ascending; of batches beyond 10**12 rows at least those up to a million.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, min(isqrt(whole), 10**6) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})


def _one(request: ShapeRequest, shape: PipelineShape) -> _Shapes:
    fields_of = [getattr(shape, field.name) for field in fields(shape)]
    width, depth, rows, recompute = (np.array([value]) for value in fields_of)
    return _Shapes(width, depth, rows, recompute, request.global_batch // (width * rows))


def _all_shapes(request: ShapeRequest) -> _Shapes:
    count, blocks, batch = len(request.cluster.devices), request.costs.blocks, request.global_batch
    numbers = np.arange(1, count + 1)
    rows = np.array(divisors(batch))
    grid = np.meshgrid(numbers, numbers[:blocks], rows, np.array(request.recompute), indexing="ij")
    width, depth, size, recompute = (axis.ravel() for axis in grid)
    microbatches, rest = np.divmod(batch, width * size)
    good = (width * depth <= count) & (rest == 0) & (microbatches > 0)
    if not request.rule.drains:
        good &= microbatches >= depth
    return _Shapes(*(column[good] for column in (width, depth, size, recompute, microbatches)))


class _Ends(NamedTuple):
    """A figure of the first, of a middle and of the last stage; one stage alone is all three."""

    first: Array
    middle: Array
    last: Array

    def most(self) -> Array:
        return np.maximum(np.maximum(self.first, self.middle), self.last)


def _ends(request: ShapeRequest, shapes: _Shapes, read: Callable[[PieceCost], Any]) -> _Ends:
    """What the blocks of a stage add up to, with the front on the first and the rear on the last."""
    costs = request.costs
    blocks = -(-costs.blocks // shapes.depth) * read(costs.block)
    front, rear, alone = read(costs.front), read(costs.rear), shapes.depth == 1
    return _Ends(
        blocks + front + np.where(alone, rear, 0.0), blocks, blocks + rear + np.where(alone, front, 0.0)
    )


def _throughput(request: ShapeRequest, shapes: _Shapes) -> Array:
    """Rows per second of each shape."""
    rule, rows, m, depth = request.rule, shapes.rows, shapes.microbatches, shapes.depth
    edge_s = _edge_s(request, shapes)
    compute = _ends(request, shapes, lambda piece: piece.forward_s.at(rows) + piece.backward_s.at(rows))
    costs = request.costs
    again_s = shapes.recompute * costs.block.forward_s.at(rows)
    again = -(-costs.blocks // depth) * again_s
    edges = _Ends(np.minimum(depth - 1, 1), np.where(depth > 2, 2, 0), np.minimum(depth - 1, 1))
    turn = _Ends(*(c + again + e * edge_s for c, e in zip(compute, edges, strict=True)))
    exchange_s, optimizer = _exchange_s(request, shapes), _optimizer_s(request, shapes)
    if not rule.drains:
        busy = _Ends(*(t + o / m for t, o in zip(turn, optimizer, strict=True)))
        return shapes.width * rows / np.maximum(busy.most(), exchange_s / m)
    if rule.overlaps:
        batch_s = (m + depth - 1) * turn.most()
    else:
        ends = sum(
            piece.forward_s.at(rows) + piece.backward_s.at(rows) for piece in (costs.front, costs.rear)
        )
        block_s = costs.block.forward_s.at(rows) + costs.block.backward_s.at(rows) + again_s
        batch_s = m * (costs.blocks * block_s + ends + (depth - 1) * edge_s)
    return request.global_batch / (batch_s + exchange_s + optimizer.most())


def _edge_s(request: ShapeRequest, shapes: _Shapes) -> Array:
    """Seconds in which one micro-batch crosses from one stage to the next, and its gradient comes back."""
    latency_s, s_per_byte = (table[shapes.width, shapes.depth] for table in request.links.across)
    return 2 * (latency_s + request.costs.input_bytes.at(shapes.rows) * s_per_byte)


def _exchange_s(request: ShapeRequest, shapes: _Shapes) -> Array:
    """Seconds of the ring sum of the largest stage's gradients: Patarasuk and Yuan 2009."""
    latency_s, s_per_byte = (table[shapes.width, shapes.depth] for table in request.links.around)
    size = _ends(request, shapes, lambda piece: piece.trained_bytes).most()
    return 2 * (shapes.width - 1) * (latency_s + size / shapes.width * s_per_byte)


def _optimizer_s(request: ShapeRequest, shapes: _Shapes) -> _Ends:
    """As the simulator has it: parameters and states read and written, gradients read."""
    rate = request.cluster.devices[0].memory_bytes_per_s
    moved = 3 + 2 * request.optimizer_bytes
    return _ends(request, shapes, lambda piece: piece.trained_bytes * moved / rate if rate > 0 else 0.0)


def _memory(request: ShapeRequest, shapes: _Shapes) -> Array:
    """Bytes of the fullest stage of each shape."""
    rule, costs, m, depth = request.rule, request.costs, shapes.microbatches, shapes.depth
    # Gradients that are summed over replicas without a flush are there beside those being made.
    sets = 1 if rule.drains else np.where(shapes.width > 1, 2, 1)
    held = _ends(
        request,
        shapes,
        lambda piece: (
            rule.versions * piece.parameter_bytes + (sets + request.optimizer_bytes) * piece.trained_bytes
        ),
    )
    blocks = -(-costs.blocks // depth)
    made = blocks * costs.block.residual_bytes.at(shapes.rows)
    given = costs.input_bytes.at(shapes.rows)
    batch = costs.batch_bytes.at(shapes.rows) * m * (1 if rule.drains else 2)

    def stage(static: Array, in_flight: Array, end: Array) -> Array:
        sets_of_residuals = np.where(shapes.recompute > 0, 1, in_flight)
        return static + batch + sets_of_residuals * made + in_flight * (given + end)

    front, rear = (piece.residual_bytes.at(shapes.rows) for piece in (costs.front, costs.rear))
    alone = depth == 1
    first = stage(held.first, rule.first(m, depth), front + np.where(alone, rear, 0.0))
    last = stage(held.last, rule.last(m, depth), rear + np.where(alone, front, 0.0))
    return np.maximum(first, last)
