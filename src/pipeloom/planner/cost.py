"""The one cost and memory model: what a stage takes and holds, for every planner.

Time of a stage for one micro-batch: forward plus backward of its ops. Transfers overlap with compute, so the
stage's turn lasts as long as the longest of compute, receiving its inputs, and returning their gradients
(links carry both directions at once); without overlap, the sum of all, on the left and on the right edge.

Memory of a stage (papers' notation: static + q * A + live):

    parameters, gradients, optimizer   each parameter once per stage, tied ones in each stage that reads them
    buffers                            likewise
    residuals     (values that its ops save, each once, received ones included) x micro-batches in flight
    boundary      receive buffers posted ahead, and messages on their way out, of values and of gradients
    transient     the largest, over its ops, of scratch plus activations (forward) or gradients (backward)
                  that are alive around the op and are no residuals, and the gradients of the parameters
                  that a micro-batch makes before they are added up

A value that several later stages read is counted once among the messages of the stage that makes it; the
simulator counts each message. The same numbers come out for any stage (`stage`) and, fast, for all
contiguous intervals of ops with one start (`row`); a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from ..ir.cluster import Cluster
from ..ir.graph import OpGraph
from ..ir.plan import StageMemory, StagePlan
from ..ir.profile import Profile
from ..ir.stages import StageGraph
from .intervals import Array, Indices, IntervalSums
from .terms import interval_terms
from .wiring import Wiring, saved_by


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What a run will do, as far as time and memory depend on it.

    optimizer_bytes: bytes of optimizer state per byte of trainable parameter: SGD 0, with momentum 1,
        Adam 2 (all in the parameter's precision).
    fresh_gradients: 1 if a micro-batch's parameter gradients are all made before they are added to those
        of earlier micro-batches, 0 if each is added at once.
    receive_ahead: receives posted ahead, each with a buffer.  sends_in_flight: messages not yet taken.
    overlap: transfers run while the stage computes.
    """

    optimizer_bytes: float = 2.0
    fresh_gradients: float = 1.0
    receive_ahead: int = 2
    sends_in_flight: int = 1
    overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a stage for one micro-batch; every field a number, or an array with one entry per stage.

    received, received_grads: values that cross in, and their gradients, which go back.
    sent, sent_grads: values that cross out, and their gradients, which come back.
    """

    parameters: Any
    trainable: Any
    buffers: Any
    residuals: Any
    received: Any
    received_grads: Any
    sent: Any
    sent_grads: Any
    transient: Any


COLUMN = {f.name: index for index, f in enumerate(fields(Footprint)) if f.name != "transient"}


def memory_parts(footprint: Footprint, in_flight: Any, options: CostOptions) -> dict[str, Any]:
    """Bytes by the kinds of `StageMemory`, elementwise."""
    f = footprint
    return {
        "parameters": f.parameters,
        "gradients": f.trainable,
        "optimizer": f.trainable * options.optimizer_bytes,
        "buffers": f.buffers,
        "residuals": f.residuals * in_flight,
        "boundary": options.receive_ahead * (f.received + f.sent_grads)
        + options.sends_in_flight * (f.sent + f.received_grads),
        "transient": f.transient + f.trainable * options.fresh_gradients,
    }


class CostModel:
    """Costs of stages of one graph on the ranks of one cluster, stage s on rank s.

    profiles: one per rank; bytes are read from the first.
    """

    def __init__(
        self, graph: OpGraph, profiles: Sequence[Profile], cluster: Cluster, options: CostOptions
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.options = options
        self.wiring = Wiring(graph)
        self.profile = profiles[0]
        self.distinct = list({id(p): p for p in profiles}.values())
        self.kind = [next(k for k, p in enumerate(self.distinct) if p is own) for own in profiles]
        self.saves = saved_by(self.wiring, self.profile)

    def __len__(self) -> int:
        """How many ops there are to assign."""
        return len(self.wiring.ops)

    # --- any stage --------------------------------------------------------------------------------

    def stage(self, stages: StageGraph, index: int, in_flight: int) -> StagePlan:
        """Times and memory of one stage of any cut."""
        stage = stages.stages[index]
        costs = self.distinct[self.kind[index]].costs
        own = [costs[name] for name in stage.ops if name in self.wiring.position]
        cheap = [name for name in (*stage.ops, *stage.clones) if self.graph.op[name].cheap]
        parts = memory_parts(self.footprint(stages, index), in_flight, self.options)
        return StagePlan(
            ops=stage.ops,
            forward_s=sum(c.forward_s for c in own) + sum(costs[name].forward_s for name in cheap),
            input_grad_s=sum(c.input_grad_s for c in own),
            weight_grad_s=sum(c.weight_grad_s for c in own),
            memory=StageMemory(**{kind: round(size) for kind, size in parts.items()}),
        )

    def footprint(self, stages: StageGraph, index: int) -> Footprint:
        """Bytes of one stage of any cut."""
        graph = self.graph
        stage = stages.stages[index]
        inside = {*stage.ops, *stage.clones}
        own = [name for name in stage.ops if name in self.wiring.position]
        parameters = [graph.parameter[name] for name in stages.params[index]]
        read = {name for member in inside for name in graph.op[member].params}
        received = {c.value.name: c.value for c in stages.crossings if c.target == index}
        sent = {c.value.name: c.value for c in stages.crossings if c.source == index}
        extra = sum(self.profile.costs[name].extra_saved_bytes for name in own)
        return Footprint(
            parameters=sum(p.bytes for p in parameters),
            trainable=sum(p.bytes for p in parameters if p.trainable and p.name in read),
            buffers=sum(graph.buffer[name].bytes for name in stages.buffers[index]),
            residuals=extra + sum(graph.value[name].bytes for name in self.residuals(inside)),
            received=sum(v.bytes for v in received.values()),
            received_grads=sum(v.bytes for v in received.values() if v.needs_grad),
            sent=sum(v.bytes for v in sent.values()),
            sent_grads=sum(v.bytes for v in sent.values() if v.needs_grad),
            transient=max((self.live[self.wiring.position[name]] for name in own), default=0.0),
        )

    def residuals(self, inside: set[str]) -> set[str]:
        """Values that a stage with these ops keeps for its backward; of views the storage that it has."""
        found: set[str] = set()
        for name in inside & self.saves.keys():
            op = self.graph.op[name]
            for saved in self.saves[name]:
                for chain in self.wiring.chains(op, saved):
                    available = [v for v in chain[:-1] if self.graph.producer[v] not in inside]
                    found.add(available[0] if available else chain[-1])
        return found

    def turn_s(self, stages: StageGraph, index: int) -> float:
        """Seconds that one micro-batch occupies a stage of any cut."""
        plan = self.stage(stages, index, 1)
        compute = plan.forward_s + plan.input_grad_s + plan.weight_grad_s
        return float(self._turn_s(self.footprint(stages, index), compute, index))

    # --- intervals of ops -------------------------------------------------------------------------

    def row(self, start: int, ends: Indices) -> tuple[Footprint, Array]:
        """Footprints and compute times of the intervals [start, end), for ascending ends.

        Returns the footprint with arrays over intervals, and seconds as (distinct profiles, intervals).
        """
        here = ends - start - 1
        sums = self._sums.row(start, int(ends[-1]))[:, here]
        columns = {name: sums[index] for name, index in COLUMN.items()}
        columns["residuals"] = columns["residuals"] + (self._extra[ends] - self._extra[start])
        seconds = self.prefix_s[:, ends] - self.prefix_s[:, start : start + 1]
        transient = np.maximum.accumulate(self.live[start : ends[-1]])[here]
        return Footprint(**columns, transient=transient), seconds + sums[len(COLUMN) :]

    def turns(self, footprint: Footprint, seconds: Array, ranks: Indices) -> Array:
        """Seconds that one micro-batch occupies each interval on each rank: (ranks, intervals)."""
        return np.stack([self._turn_s(footprint, seconds[self.kind[r]], int(r)) for r in ranks])

    def memory(self, footprint: Footprint, in_flight: Indices) -> Array:
        """Bytes of each interval with each count of micro-batches in flight: (counts, intervals)."""
        parts = memory_parts(footprint, in_flight[:, None], self.options)
        return np.asarray(sum(parts.values()), dtype=np.float64)

    def edges(self, footprint: Footprint, ranks: Indices) -> Array:
        """Seconds in transfers over the left edge of each interval on each rank: (ranks, intervals)."""
        return np.stack([sum(self._left_s(footprint, int(r))) for r in ranks])

    @cached_property
    def crossing_bytes(self) -> Array:
        """Bytes of the values that cross a cut in front of op p, for p = 0 .. number of ops."""
        change = np.zeros(len(self) + 1)
        for name, value in self.graph.value.items():
            made, readers = self.wiring.made_at(name), self.wiring.readers(name)
            if made >= 0 and readers:
                change[made + 1] += value.bytes
                change[readers[-1] + 1] -= value.bytes
        return np.cumsum(change)

    def _left_s(self, f: Footprint, rank: int) -> tuple[Any, Any]:
        return self._edge_s(rank - 1, rank, f.received), self._edge_s(rank, rank - 1, f.received_grads)

    def _turn_s(self, f: Footprint, compute: Any, rank: int) -> Any:
        forward, backward = self._left_s(f, rank)
        if self.options.overlap:
            return np.maximum(compute, np.maximum(forward, backward))
        right = self._edge_s(rank, rank + 1, f.sent) + self._edge_s(rank + 1, rank, f.sent_grads)
        return compute + forward + backward + right

    def _edge_s(self, source: int, target: int, size: Any) -> Any:
        if min(source, target) < 0 or max(source, target) >= len(self.cluster.devices):
            return 0.0 * size
        link = self.cluster.link(source, target)
        return np.where(size > 0, link.latency_s + size / link.bandwidth_bytes_per_s, 0.0)

    @cached_property
    def prefix_s(self) -> Array:
        """Compute seconds of the first p ops, clones not counted: (distinct profiles, ops + 1)."""
        names = [op.name for op in self.wiring.ops]
        costs = [[p.costs[n].forward_s + p.costs[n].backward_s for n in names] for p in self.distinct]
        return np.concatenate([np.zeros((len(costs), 1)), np.cumsum(costs, axis=1)], axis=1)

    @cached_property
    def _extra(self) -> Array:
        extra = [self.profile.costs[op.name].extra_saved_bytes for op in self.wiring.ops]
        return np.concatenate([[0.0], np.cumsum(extra, dtype=np.float64)])

    @cached_property
    def live(self) -> Array:
        """Per op: its scratch, plus what is alive around it in the forward (no residuals) or the backward."""
        wiring = self.wiring
        forward = np.zeros(len(self) + 1)
        backward = np.zeros(len(self) + 1)
        saved = {name for names in self.saves.values() for name in names}
        ends: dict[str, tuple[int, int]] = {}
        for name, base in wiring.base.items():
            positions = [p for p in (wiring.made_at(name), *wiring.readers(name)) if p >= 0]
            if positions:
                first, last = ends.get(base, (len(self), -1))
                ends[base] = min(first, *positions), max(last, *positions)
        batch = {v.name for v in self.graph.inputs}
        for base, (first, last) in ends.items():
            value = self.graph.value[base]
            if base not in batch and base not in saved:
                forward[first] += value.bytes
                forward[last + 1] -= value.bytes
            if value.needs_grad:
                backward[first] += value.bytes
                backward[last + 1] -= value.bytes
        scratch = [self.profile.costs[op.name].transient_bytes for op in wiring.ops]
        alive = np.maximum(np.cumsum(forward), np.cumsum(backward))[:-1]
        return np.asarray(alive + np.array(scratch, dtype=np.float64))

    @cached_property
    def _sums(self) -> IntervalSums:
        clones = [{name: c.forward_s for name, c in p.costs.items()} for p in self.distinct]
        terms = interval_terms(self.wiring, self.saves, COLUMN, clones)
        return IntervalSums(len(self), len(COLUMN) + len(self.distinct), terms)
