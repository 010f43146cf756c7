"""BlockCosts: a model as equal repeated blocks between a front (embedding) and a rear (head and loss).

All that depends on the size of micro-batches is taken to be affine in it, from two sizes at which the model
was captured and profiled: bytes are, and times nearly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from ..ir.cluster import Cluster
from ..ir.errors import PlanError
from .microbatch_sizes import ProfiledModel
from .request import profile_of
from .search.layer_groups import layers
from .stage_cost.arrays import Array, Indices
from .stage_cost.model import CostModel
from .stage_cost.peak_memory import CostOptions


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


@dataclass(frozen=True, kw_only=True)
class PieceCost:
    """One piece of the model, for one micro-batch by its rows.

    forward_s, backward_s: seconds.  residual_bytes: kept from its forward for its backward, what it receives
        not counted.
    parameter_bytes: of all its parameters.  trained_bytes: of those that have a gradient.
    """

    forward_s: Affine = Affine()
    backward_s: Affine = Affine()
    residual_bytes: Affine = Affine()
    parameter_bytes: float = 0.0
    trained_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """A model of `blocks` equal blocks.

    front, rear: what stands before the first and behind the last.  block: one of them, on average.
    input_bytes: what a block receives.  batch_bytes: of the batch.  Both of one micro-batch, by its rows.
    """

    blocks: int
    front: PieceCost
    block: PieceCost
    rear: PieceCost
    input_bytes: Affine
    batch_bytes: Affine = Affine()


def block_costs(first: ProfiledModel, second: ProfiledModel, cluster: Cluster) -> BlockCosts:
    """The blocks of a model from two sizes of micro-batches, on the devices of a cluster, which are alike.

    Raises: PlanError if the model has no repeated layers, or the two are of different ops or of one size.
    """
    return _between(first, second, cluster, _by_layers)


def even_costs(first: ProfiledModel, second: ProfiledModel, cluster: Cluster) -> BlockCosts:
    """The same of a model that can be cut into equal parts anywhere: as many blocks as places to cut.

    What a schedule could do at best, since stages are cut by op.
    Raises: PlanError if the two are of different ops or of one size.
    """
    return _between(first, second, cluster, _evenly)


def _between(
    first: ProfiledModel,
    second: ProfiledModel,
    cluster: Cluster,
    figures: Callable[[CostModel], _Figures],
) -> BlockCosts:
    if first.size == second.size or len(first.graph.ops) != len(second.graph.ops):
        raise PlanError(
            f"samples of {first.size} and {second.size} rows, with {len(first.graph.ops)} and "
            f"{len(second.graph.ops)} ops",
            hint="capture one model at two sizes",
        )
    low, high = (figures(_cost_model(sample, cluster)) for sample in (first, second))
    rise = float(second.size - first.size)

    def affine(read: Callable[[_Figures], float]) -> Affine:
        slope = (read(high) - read(low)) / rise
        return Affine(read(low) - slope * first.size, slope)

    def piece(name: str) -> PieceCost:
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


@dataclass(frozen=True)
class _Sums:
    """A piece at one size; fields as those of `PieceCost`."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    residual_bytes: float = 0.0
    parameter_bytes: float = 0.0
    trained_bytes: float = 0.0


@dataclass(frozen=True)
class _Figures:
    """A model at one size; fields as those of `BlockCosts`."""

    blocks: int
    front: _Sums
    block: _Sums
    rear: _Sums
    input_bytes: float
    batch_bytes: float


def _cost_model(sample: ProfiledModel, cluster: Cluster) -> CostModel:
    device = cluster.devices[0]
    profile = profile_of(sample.profiles, device.name, sample.graph)
    one = replace(cluster, devices=(device,))
    return CostModel(sample.graph, [profile], one, CostOptions(microbatches=1))


def _evenly(model: CostModel) -> _Figures:
    count = len(model.cut_points) - 1
    whole = _sums(model, 0, len(model))
    inner = model.cut_points[1:-1]
    return _Figures(
        blocks=count,
        front=_Sums(),
        block=_Sums(**{name: figure / count for name, figure in vars(whole).items()}),
        rear=_Sums(),
        # Cuts are made where little crosses.
        input_bytes=float(np.median(model.crossing_bytes[inner])) if len(inner) else 0.0,
        batch_bytes=_batch_bytes(model),
    )


def _batch_bytes(model: CostModel) -> float:
    return float(sum(value.bytes for value in model.graph.inputs))


def _by_layers(model: CostModel) -> _Figures:
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
    return _Figures(
        blocks=count,
        front=_sums(model, 0, begin),
        block=_Sums(**mean),
        rear=_sums(model, end, ops),
        input_bytes=float(np.mean(model.crossing_bytes[starts])),
        batch_bytes=_batch_bytes(model),
    )


def _sums(model: CostModel, start: int, end: int) -> _Sums:
    """The ops [start, end) as a stage of their own, the batch apart."""
    if start == end:
        return _Sums()
    footprint, seconds = model.row(start, np.array([end]), exact=False)
    part = footprint.at(0)
    forward_s = float(model.forward_s[0, start:end].sum())
    return _Sums(
        forward_s=forward_s,
        backward_s=max(0.0, float(seconds[0, 0]) - forward_s),
        residual_bytes=part.residuals,
        parameter_bytes=part.parameters,
        trained_bytes=part.trainable,
    )
