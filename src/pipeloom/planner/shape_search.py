"""The shape of a training run in closed form: width, depth, rows per micro-batch, recomputation.

The model is cut into d stages of equal block count, each replicated w times; micro-batches of b rows, of
which a step of B rows has m = B / (w b) per pipeline. All (w, d, b, recompute) with w d <= devices count.

    seconds of a stage    c C_i + P_i    C_i: forward and backward, c adds the forward again where it is
                                         recomputed;  P_i: what crosses its edges, there and back, not hidden
    exchange              R_i            the ring sum of a stage's gradients over its replicas
    optimizer             O_i            parameters and states moved through the device's memory

    2bw                   t = max_i max(c C_i + P_i + O_i / m, R_i / m)          a micro-batch takes t, m >= d
    flush, gpipe          t_batch = (m + d - 1) max_i(c C_i + P_i) + max_i R_i + max_i O_i

    bytes of a stage      v W + G + S + q (A_tot + A_in)         everything kept
                          v W + G + S + A_tot + q A_in           recomputed
                          with v versions of parameters W, gradients G, optimizer state S, q in flight

Where d does not divide the blocks, all stages count as those that have one more.

Source: PipeDream-2BW (arXiv 2006.09503), section 3.4, for t with 2bw and for W and A. Its formulas leave out
G, S and O, the front and the rear of the model, and the time of schedules that flush; these are added here.
As there, q is d for the first stage; for the last, which holds the rear, it is 1 (m with gpipe). Rear and
front are never recomputed.

The model is equal repeated blocks between a front (embedding) and a rear (head and loss). All that depends on
the size of micro-batches is taken to be affine in it, from two sizes at which the model was captured and
profiled: bytes are, and times nearly.

Replica r of stage s is on rank s * w + r, so that the replicas of a stage are neighbours (PipeDream-2BW,
section 3.3: sums of gradients stay within a node, activations go between).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import isqrt
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError, PlanError
from ..ir.text import format_bytes
from .microbatch_sizes import ProfiledModel
from .request import profile_of
from .search.layer_groups import layers
from .stage_cost.model import CostModel
from .stage_cost.peak_memory import CostOptions
from .stage_cost.tensors import Array, Indices


@dataclass(frozen=True)
class WideLinks:
    """By [width, depth], the latency and the seconds per byte of the slowest link that is used; 0 where none
    is.

    across: between neighbouring stages, where all pipelines of a node share its network link.
    around: the ring of a stage's replicas.
    """

    across: tuple[Array, Array]
    around: tuple[Array, Array]


def wide_links(cluster: Cluster) -> WideLinks:
    """Those of a cluster, for every width and depth that it has devices for.

    >>> from ..ir.cluster import Device, Link
    >>> devices = tuple(Device(name="any", memory_bytes=1, node=node) for node in (0, 0, 1, 1))
    >>> fast, slow = Link(bandwidth_bytes_per_s=10.0), Link(bandwidth_bytes_per_s=1.0)
    >>> links = wide_links(Cluster(devices=devices, within_node=fast, between_nodes=slow))
    >>> links.around[1][2, 2].item(), links.across[1][2, 2].item()  # two stages, one in each node
    (0.1, 1.0)
    """
    count = len(cluster.devices)
    pace = _Pace(cluster)
    tables = [np.zeros((count + 1, count + 1)) for _ in range(4)]
    for width in range(1, count + 1):
        depth = count // width
        # Row s has the replicas of stage s. A pipeline of fewer stages has the first rows, so that the
        # slowest link of any depth is a running maximum over the rows:
        #
        #     width 2    0 1            across: 0-2, 1-3, then 2-4, 3-5        around: 0-1, then 2-3, then 4-5
        #     depth 3    2 3
        #                4 5
        #
        ranks = np.arange(width * depth).reshape(depth, width)
        if depth > 1:
            flows = min(width, pace.most_in_a_node)
            for table, each in zip(tables[:2], pace.of(ranks[:-1], ranks[1:], flows), strict=True):
                table[width, 2 : depth + 1] = np.maximum.accumulate(each.max(axis=1))
        if width > 1:
            for table, each in zip(tables[2:], pace.of(ranks, np.roll(ranks, -1, axis=1), 1), strict=True):
                table[width, 1 : depth + 1] = np.maximum.accumulate(each.max(axis=1))
    return WideLinks(across=(tables[0], tables[1]), around=(tables[2], tables[3]))


class _Pace:
    """Latency and seconds per byte between any two ranks, as `Cluster.link` says it of one pair."""

    def __init__(self, cluster: Cluster) -> None:
        names = {name: number for number, name in enumerate(cluster.groups)}
        self.group = np.array([-1 if d.group is None else names[d.group] for d in cluster.devices])
        self.node = np.array([d.node for d in cluster.devices])
        self.most_in_a_node = max(Counter(d.node for d in cluster.devices).values())
        links = [*cluster.groups.values(), cluster.within_node]
        self.within = len(links) - 1
        if cluster.between_nodes is not None:
            links.append(cluster.between_nodes)
        self.latency_s = np.array([link.latency_s for link in links])
        self.s_per_byte = np.array([1 / link.bandwidth_bytes_per_s for link in links])
        self.between = len(links) - 1
        shared = cluster.node_link
        self.shared_s_per_byte = 0.0 if shared is None else 1 / shared.bandwidth_bytes_per_s

    def of(self, a: Indices, b: Indices, flows: int) -> tuple[Array, Array]:
        """flows: messages that leave a node at once, and share its network link."""
        grouped = (self.group[a] == self.group[b]) & (self.group[a] >= 0)
        inside = self.node[a] == self.node[b]
        link = np.where(grouped, self.group[a], np.where(inside, self.within, self.between))
        crossing = ~grouped & ~inside
        s_per_byte = self.s_per_byte[link]
        shared = np.maximum(s_per_byte, flows * self.shared_s_per_byte)
        return self.latency_s[link], np.where(crossing, shared, s_per_byte)


@dataclass(frozen=True)
class Affine:
    """What is `constant` + `per_row` * rows, and never below 0.

    >>> Affine(1.0, 2.0).at(np.array([1, 4])).tolist()
    [3.0, 9.0]
    """

    constant: float = 0.0
    per_row: float = 0.0

    def at(self, rows: Indices) -> Array:
        figures = self.constant + self.per_row * rows.astype(np.float64)
        return np.asarray(np.maximum(figures, 0.0), dtype=np.float64)


N = TypeVar("N", Affine, float)
"""What depends on the rows of a micro-batch: for any number of them, or as it is at one."""


@dataclass(frozen=True, kw_only=True)
class PieceCost(Generic[N]):
    """One piece of the model, for one micro-batch.

    forward_s, backward_s: seconds.  residual_bytes: kept from its forward for its backward, what it receives
        not counted.
    parameter_bytes: of all its parameters.  trained_bytes: of those that have a gradient.
    """

    forward_s: N
    backward_s: N
    residual_bytes: N
    parameter_bytes: float = 0.0
    trained_bytes: float = 0.0


NO_PIECE = PieceCost(forward_s=0.0, backward_s=0.0, residual_bytes=0.0)


@dataclass(frozen=True, kw_only=True)
class BlockCosts(Generic[N]):
    """A model of `blocks` equal blocks.

    front, rear: what stands before the first and behind the last.  block: one of them, on average.
    input_bytes: what a block receives.  batch_bytes: of the batch.  Both of one micro-batch, by its rows.
    """

    blocks: int
    front: PieceCost[N]
    block: PieceCost[N]
    rear: PieceCost[N]
    input_bytes: N
    batch_bytes: N


def block_costs(first: ProfiledModel, second: ProfiledModel, cluster: Cluster) -> BlockCosts[Affine]:
    """The blocks of a model from two sizes of micro-batches, on the devices of a cluster, which are alike.

    Raises: PlanError if the model has no repeated layers, or the two are of different ops or of one size.
    """
    return _between(first, second, cluster, _by_layers)


def even_costs(first: ProfiledModel, second: ProfiledModel, cluster: Cluster) -> BlockCosts[Affine]:
    """The same of a model that can be cut into equal parts anywhere: as many blocks as places to cut.

    What a schedule could do at best, since stages are cut by op.
    Raises: PlanError if the two are of different ops or of one size.
    """
    return _between(first, second, cluster, _evenly)


def _between(
    first: ProfiledModel,
    second: ProfiledModel,
    cluster: Cluster,
    figures: Callable[[CostModel], BlockCosts[float]],
) -> BlockCosts[Affine]:
    if first.size == second.size or len(first.graph.ops) != len(second.graph.ops):
        raise PlanError(
            f"samples of {first.size} and {second.size} rows, with {len(first.graph.ops)} and "
            f"{len(second.graph.ops)} ops",
            hint="capture one model at two sizes",
        )
    low, high = (figures(_cost_model(sample, cluster)) for sample in (first, second))
    rise = float(second.size - first.size)

    def affine(read: Callable[[BlockCosts[float]], float]) -> Affine:
        slope = (read(high) - read(low)) / rise
        return Affine(read(low) - slope * first.size, slope)

    def piece(name: str) -> PieceCost[Affine]:
        whole = getattr(low, name)
        return PieceCost(
            forward_s=affine(lambda f: getattr(f, name).forward_s),
            backward_s=affine(lambda f: getattr(f, name).backward_s),
            residual_bytes=affine(lambda f: getattr(f, name).residual_bytes),
            parameter_bytes=whole.parameter_bytes,
            trained_bytes=whole.trained_bytes,
        )

    return BlockCosts(
        blocks=low.blocks,
        front=piece("front"),
        block=piece("block"),
        rear=piece("rear"),
        input_bytes=affine(lambda f: f.input_bytes),
        batch_bytes=affine(lambda f: f.batch_bytes),
    )


def _cost_model(sample: ProfiledModel, cluster: Cluster) -> CostModel:
    device = cluster.devices[0]
    profile = profile_of(sample.profiles, device.name, sample.graph)
    one = replace(cluster, devices=(device,))
    return CostModel(sample.graph, [profile], one, CostOptions(microbatches=1))


def _evenly(model: CostModel) -> BlockCosts[float]:
    count = len(model.cut_points) - 1
    whole = _sums(model, 0, len(model))
    inner = model.cut_points[1:-1]
    return BlockCosts(
        blocks=count,
        front=NO_PIECE,
        block=PieceCost(**{name: figure / count for name, figure in vars(whole).items()}),
        rear=NO_PIECE,
        # Cuts are made where little crosses.
        input_bytes=float(np.median(model.tables.crossing_bytes[inner])) if len(inner) else 0.0,
        batch_bytes=_batch_bytes(model),
    )


def _batch_bytes(model: CostModel) -> float:
    return float(sum(value.bytes for value in model.graph.inputs))


def _by_layers(model: CostModel) -> BlockCosts[float]:
    pieces = layers(model.readers.ops)
    names = list(dict.fromkeys(piece.layer for piece in pieces if piece.layer))
    own = [piece for piece in pieces if piece.layer]
    if len(names) < 2:
        raise PlanError(
            f"{model.graph.name} has no repeated layers, which the closed form is for",
            hint="leave out --closed-form, and plans are simulated",
        )
    begin, end, ops = own[0].start, own[-1].end, len(model)
    starts = [next(piece.start for piece in own if piece.layer == name) for name in names]
    apart = [_sums(model, start, stop) for start, stop in zip(starts, [*starts[1:], end], strict=True)]
    count = len(names)
    mean = {field.name: sum(getattr(one, field.name) for one in apart) / count for field in fields(PieceCost)}
    return BlockCosts(
        blocks=count,
        front=_sums(model, 0, begin),
        block=PieceCost(**mean),
        rear=_sums(model, end, ops),
        input_bytes=float(np.mean(model.tables.crossing_bytes[starts])),
        batch_bytes=_batch_bytes(model),
    )


def _sums(model: CostModel, start: int, end: int) -> PieceCost[float]:
    if start == end:
        return NO_PIECE
    footprint, seconds = model.row(start, np.array([end]), exact=False)
    part = footprint.at(0)
    forward_s = float(model.tables.forward_s[0, start:end].sum())
    return PieceCost(
        forward_s=forward_s,
        backward_s=max(0.0, float(seconds[0, 0]) - forward_s),
        residual_bytes=part.residuals,
        parameter_bytes=part.parameters,
        trained_bytes=part.gradients,
    )


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
    first, last: (micro-batches per step, depth) -> most in flight on the first and on the last stage.
    """

    versions: int
    drains: bool
    first: Callable[[Any, Any], Any]
    last: Callable[[Any, Any], Any]


PIPELININGS: dict[str, Pipelining] = {
    "2bw": Pipelining(versions=2, drains=False, first=lambda m, d: d, last=lambda m, d: np.ones_like(m)),
    "flush": Pipelining(versions=1, drains=True, first=np.minimum, last=lambda m, d: np.ones_like(m)),
    "gpipe": Pipelining(versions=1, drains=True, first=lambda m, d: m, last=lambda m, d: m),
}
"""By name; `flush` is 1F1B."""


@dataclass(frozen=True, kw_only=True)
class ShapeRequest:
    """What a shape is chosen for.

    cluster: of devices that are alike.  global_batch: rows per step, of all pipelines.
    pipelining: a name of `PIPELININGS`.  optimizer_bytes: of state per byte of trained parameters.
    recompute: what is allowed.
    Raises: PlanError if devices differ, or the batch has no rows.
    """

    costs: BlockCosts[Affine]
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


def rank_shapes(request: ShapeRequest, *, slack: float = 1.0) -> list[RankedShape]:
    """All shapes that fit, the fastest first; of equally fast ones those with fewer devices, then with fewer
    bytes.

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


def _ends(request: ShapeRequest, shapes: _Shapes, read: Callable[[PieceCost[Affine]], Any]) -> _Ends:
    """What the blocks of a stage add up to, with the front on the first and the rear on the last."""
    costs = request.costs
    blocks = -(-costs.blocks // shapes.depth) * read(costs.block)
    front, rear, alone = read(costs.front), read(costs.rear), shapes.depth == 1
    return _Ends(
        blocks + front + np.where(alone, rear, 0.0), blocks, blocks + rear + np.where(alone, front, 0.0)
    )


def _throughput(request: ShapeRequest, shapes: _Shapes) -> Array:
    rule, rows, m, depth = request.rule, shapes.rows, shapes.microbatches, shapes.depth
    edge_s = _edge_s(request, shapes)
    compute = _ends(request, shapes, lambda piece: piece.forward_s.at(rows) + piece.backward_s.at(rows))
    costs = request.costs
    again = -(-costs.blocks // depth) * shapes.recompute * costs.block.forward_s.at(rows)
    edges = _Ends(np.minimum(depth - 1, 1), np.where(depth > 2, 2, 0), np.minimum(depth - 1, 1))
    turn = _Ends(*(c + again + e * edge_s for c, e in zip(compute, edges, strict=True)))
    exchange_s, optimizer = _exchange_s(request, shapes), _optimizer_s(request, shapes)
    if not rule.drains:
        busy = _Ends(*(t + o / m for t, o in zip(turn, optimizer, strict=True)))
        return shapes.width * rows / np.maximum(busy.most(), exchange_s / m)
    batch_s = (m + depth - 1) * turn.most()
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
