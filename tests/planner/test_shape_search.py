"""The closed form against a brute force that goes over every shape, stage and link one by one."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import assume, given, settings, strategies as st
from trials import examples

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.planner.shape_search import (
    Affine,
    BlockCosts,
    PieceCost,
    PipelineShape,
    ShapeRequest,
    memory,
    rank_shapes,
    throughput,
)


class BruteForce:
    """The formulas of `shape_search`, stage by stage and link by link."""

    def __init__(self, request: ShapeRequest, shape: PipelineShape) -> None:
        self.request, self.shape, self.costs = request, shape, request.costs
        self.m = request.global_batch // (shape.width * shape.microbatch_size)
        self.stages, self.blocks = range(shape.depth), -(-self.costs.blocks // shape.depth)

    def pieces(self, stage: int) -> list[tuple[int, PieceCost]]:
        front = [(1, self.costs.front)] * (stage == 0)
        rear = [(1, self.costs.rear)] * (stage == self.shape.depth - 1)
        return [*front, (self.blocks, self.costs.block), *rear]

    def sum(self, stage: int, read: Callable[[PieceCost], float]) -> float:
        return sum(count * read(piece) for count, piece in self.pieces(stage))

    def at(self, figure: Affine) -> float:
        return max(0.0, figure.constant + figure.per_row * self.shape.microbatch_size)

    def slowest(self, pairs: list[tuple[int, int]], flows: int) -> tuple[float, float]:
        """Latency and seconds per byte."""
        cluster, latency, per_byte = self.request.cluster, 0.0, 0.0
        for a, b in pairs:
            link, (one, other) = cluster.link(a, b), (cluster.devices[a], cluster.devices[b])
            latency = max(latency, link.latency_s)
            per_byte = max(per_byte, 1 / link.bandwidth_bytes_per_s)
            grouped = one.group is not None and one.group == other.group
            if cluster.node_link is not None and one.node != other.node and not grouped:
                per_byte = max(per_byte, flows / cluster.node_link.bandwidth_bytes_per_s)
        return latency, per_byte

    def edge_s(self) -> float:
        width, nodes = self.shape.width, [d.node for d in self.request.cluster.devices]
        flows = min(width, max(nodes.count(node) for node in nodes))
        pairs = [(s * width + r, (s + 1) * width + r) for s in self.stages[:-1] for r in range(width)]
        latency, per_byte = self.slowest(pairs, flows)
        return 2 * (latency + self.at(self.costs.input_bytes) * per_byte)

    def turn_s(self, stage: int) -> float:
        seconds = self.sum(stage, lambda piece: self.at(piece.forward_s) + self.at(piece.backward_s))
        again = self.shape.recompute * self.blocks * self.at(self.costs.block.forward_s)
        return seconds + again + ((stage > 0) + (stage < self.shape.depth - 1)) * self.edge_s()

    def trained(self, stage: int) -> float:
        return self.sum(stage, lambda piece: piece.trained_bytes)

    def exchange_s(self) -> float:
        width = self.shape.width
        pairs = [(s * width + r, s * width + (r + 1) % width) for s in self.stages for r in range(width)]
        latency, per_byte = self.slowest(pairs, 1) if width > 1 else (0.0, 0.0)
        return 2 * (width - 1) * (latency + max(map(self.trained, self.stages)) / width * per_byte)

    def optimizer_s(self, stage: int) -> float:
        rate = self.request.cluster.devices[0].memory_bytes_per_s
        return self.trained(stage) * (3 + 2 * self.request.optimizer_bytes) / rate if rate else 0.0

    def throughput(self) -> float:
        shape, m = self.shape, self.m
        if self.request.pipelining == "2bw":
            turn = max(self.turn_s(s) + self.optimizer_s(s) / m for s in self.stages)
            return shape.width * shape.microbatch_size / max(turn, self.exchange_s() / m)
        batch_s = (m + shape.depth - 1) * max(map(self.turn_s, self.stages))
        after_s = self.exchange_s() + max(map(self.optimizer_s, self.stages))
        return self.request.global_batch / (batch_s + after_s)

    def stage_bytes(self, stage: int) -> float:
        shape, request, asynchronous = self.shape, self.request, self.request.pipelining == "2bw"
        behind = shape.depth - stage
        in_flight = {"2bw": behind, "flush": min(self.m, behind), "gpipe": self.m}[request.pipelining]
        sets = 2 if asynchronous and shape.width > 1 else 1
        total = (1 + asynchronous) * self.sum(stage, lambda piece: piece.parameter_bytes)
        total += (sets + request.optimizer_bytes) * self.trained(stage)
        total += (1 + asynchronous) * self.m * self.at(self.costs.batch_bytes)
        total += in_flight * self.at(self.costs.input_bytes)

        def kept(piece: PieceCost) -> float:
            again = shape.recompute and piece is self.costs.block
            return (1 if again else in_flight) * self.at(piece.residual_bytes)

        return total + self.sum(stage, kept)

    def memory(self) -> float:
        return max(map(self.stage_bytes, self.stages))


def every_shape(request: ShapeRequest) -> list[PipelineShape]:
    count, batch = len(request.cluster.devices), request.global_batch
    depths = range(1, min(count, request.costs.blocks) + 1)
    shapes = [
        PipelineShape(width=w, depth=d, microbatch_size=b, recompute=r)
        for w, d, b, r in product(range(1, count + 1), depths, range(1, batch + 1), request.recompute)
        if w * d <= count and batch % (w * b) == 0
    ]
    if request.pipelining == "2bw":
        return [shape for shape in shapes if batch // (shape.width * shape.microbatch_size) >= shape.depth]
    return shapes


AMOUNT = st.integers(0, 40).map(float)
AFFINE = st.builds(Affine, AMOUNT, AMOUNT)


def piece(forward: Affine, backward: Affine, residuals: Affine, trained: float, frozen: float) -> PieceCost:
    bytes_ = {"residual_bytes": residuals, "parameter_bytes": trained + frozen, "trained_bytes": trained}
    return PieceCost(forward_s=forward, backward_s=backward, **bytes_)


PIECE = st.builds(piece, AFFINE, AFFINE, AFFINE, AMOUNT, AMOUNT)
LINK = st.builds(Link, bandwidth_bytes_per_s=st.integers(1, 50).map(lambda n: n / 2), latency_s=AMOUNT)


@st.composite
def requests(draw: st.DrawFn) -> ShapeRequest:
    nodes, each = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (1, 6), (2, 2), (2, 3), (2, 4), (3, 2)]))
    card = Device(name="any", memory_bytes=draw(st.integers(100, 6000)), memory_bytes_per_s=draw(AMOUNT))
    ranks, paired = range(nodes * each), each % 2 == 0 and draw(st.booleans())
    pairs = [f"pair {rank // 2}" if paired else None for rank in ranks]
    cluster = Cluster(
        devices=tuple(replace(card, node=rank // each, group=pairs[rank]) for rank in ranks),
        within_node=draw(LINK),
        between_nodes=draw(LINK) if nodes > 1 else None,
        groups={pair: draw(LINK) for pair in sorted(set(pairs))} if paired else {},
        node_link=draw(LINK) if nodes > 1 and draw(st.booleans()) else None,
    )
    block = replace(draw(PIECE), forward_s=Affine(1.0, draw(AMOUNT)))
    pieces = {"front": draw(PIECE), "block": block, "rear": draw(PIECE)}
    sizes = {"input_bytes": draw(AFFINE), "batch_bytes": draw(AFFINE)}
    return ShapeRequest(
        costs=BlockCosts(blocks=draw(st.integers(2, 9)), **pieces, **sizes),
        cluster=cluster,
        global_batch=draw(st.sampled_from([1, 2, 6, 8, 12, 16, 24])),
        pipelining=draw(st.sampled_from(["2bw", "flush", "gpipe"])),
        optimizer_bytes=draw(st.sampled_from([0.0, 1.0, 2.0])),
        recompute=draw(st.sampled_from([(False,), (True,), (False, True)])),
    )


@examples(80, 200)
@given(requests())
def test_equals_brute_force(request: ShapeRequest) -> None:
    each = {shape: BruteForce(request, shape) for shape in every_shape(request)}
    rates = {shape: one.throughput() for shape, one in each.items()}
    fitting = [shape for shape, one in each.items() if one.memory() <= request.cap_bytes]
    best = max((rates[shape] for shape in fitting), default=-inf)
    if not fitting:
        with pytest.raises(InfeasibleError, match="need"):
            rank_shapes(request)
        return
    ranked = rank_shapes(request)
    assert {one.shape for one in ranked} == set(fitting)
    for shape, rate, peak in ranked:
        assert (rate, peak) == pytest.approx((rates[shape], each[shape].memory()), rel=1e-12)
        assert (throughput(request, shape), memory(request, shape)) == (rate, peak)
    assert ranked[0].rows_per_s == pytest.approx(best, rel=1e-12)


@settings(max_examples=10)
@given(requests())
def test_unlike_devices_are_refused(request: ShapeRequest) -> None:
    first, *others = request.cluster.devices
    assume(others)
    with pytest.raises(PlanError, match="alike, the cluster has"):
        replace(request, cluster=replace(request.cluster, devices=(replace(first, name="one"), *others)))
