"""The one cost and memory model: what a stage takes and holds, for every planner.

Time of a stage for one micro-batch: forward plus backward of its ops. Transfers overlap with compute, so the
stage's turn lasts as long as the longest of compute, receiving its inputs, and returning their gradients
(links carry both directions at once); without overlap, the sum of all, on the left and on the right edge.

Memory of a stage (in papers: static + q * A + live):

    parameters, gradients, optimizer   each parameter once per stage, tied ones in each stage that reads them;
                 of parameters as many versions as the weight policy keeps
    buffers      likewise; and the whole batch, which every rank holds
    residuals    what its ops save, each value once, x micro-batches in flight; of received values the
                 receive buffer is kept instead, and the batch is there anyway
    boundary     receive buffers of the micro-batches in flight and of those posted ahead, and messages on
                 their way out, of values and of gradients
    transient    what the newest micro-batch needs at some moment beyond its residuals and what it sends
                 (sweep.py)

The peak is at the worst moment of the last forward before the first backward, or of that backward: each has
its own transient part and its own messages. Where residuals are small, it is at the optimizer's step, which
needs one more tensor of the largest parameter.

A value that several later stages read is counted once among the messages of an interval of ops; for a stage
of a cut, and in the simulator, each message counts. But for that, the same numbers come out for any
stage (`stage`) and, fast, for all intervals of ops with one start (`row`); a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...ir.cluster import Cluster
from ...ir.graph import OpGraph
from ...ir.plan import StageMemory, StagePlan
from ...ir.profile import Profile
from ...ir.stages import StageGraph
from ...ir.weight_policy import FLUSH, WEIGHT_POLICIES
from .interval_sums import Array, Indices, IntervalSums
from .liveness import Sweep
from .readers import Wiring, saved_by
from .tensors import tensors_of
from .terms import interval_terms


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What a run will do, as far as time and memory depend on it.

    optimizer_bytes: bytes of optimizer state per byte of trainable parameter: SGD 0, with momentum 1,
        Adam 2 (all in the parameter's precision).
    receive_ahead: receives posted ahead, each with a buffer.  sends_in_flight: messages not yet taken when
        the next one is made; 0 where each is through at once.
    overlap: transfers run while the stage computes.
    weights: the weight policy, see `ir.weight_policy`.
    """

    microbatches: int
    optimizer_bytes: float = 2.0
    receive_ahead: int = 2
    sends_in_flight: int = 1
    overlap: bool = True
    weights: str = FLUSH


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a stage for one micro-batch; every field a number, or an array with one entry per stage.

    kept: how many received storages an op saves; with none, receive buffers are free after the forward.
    received, received_grads: values that cross in, and their gradients, which go back.
    sent, sent_grads: values that cross out, and their gradients, which come back.
    whole: of the values that cross out those that fill a storage; others are sent as copies, which are there
        beside the storage that they are parts of.
    largest: of the trainable parameters.
    transient: in the forward, and in the backward; see the module's docstring.
    """

    parameters: Any
    trainable: Any
    buffers: Any
    residuals: Any
    kept: Any
    received: Any
    received_grads: Any
    sent: Any
    sent_grads: Any
    whole: Any
    largest: Any
    transient: Any


class Moment(NamedTuple):
    """Bytes at one moment of a step, besides what is there all the time and residuals."""

    boundary: Any
    transient: Any

    @property
    def total(self) -> Any:
        return self.boundary + self.transient


COLUMN = {
    f.name: index for index, f in enumerate(fields(Footprint)) if f.name not in ("largest", "transient")
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
        parts = self._memory_parts(self.footprint(stages, index), in_flight)
        return StagePlan(
            ops=stage.ops,
            forward_s=sum(c.forward_s for c in own) + sum(costs[name].forward_s for name in cheap),
            input_grad_s=sum(c.input_grad_s for c in own),
            weight_grad_s=sum(c.weight_grad_s for c in own),
            memory=StageMemory(**{kind: round(float(size)) for kind, size in parts.items()}),
        )

    def footprint(self, stages: StageGraph, index: int, *, once: bool = False) -> Footprint:
        """Bytes of one stage of any cut.

        once: a value that several stages read counts once, as for an interval whose readers may be anywhere.
        """
        graph = self.graph
        stage = stages.stages[index]
        inside = {*stage.ops, *stage.clones}
        parameters = [graph.parameter[name] for name in stages.params[index]]
        received = {c.value.name: c.value.needs_grad for c in stages.crossings if c.target == index}
        crossing = [c.value for c in stages.crossings if c.source == index]
        each = {v.name: v for v in sorted(crossing, key=lambda v: v.needs_grad)}
        sent = list(each.values()) if once else crossing
        size = {name: graph.value[name].bytes for name in received}
        positions = [self.wiring.position[name] for name in stage.ops if name in self.wiring.position]
        residuals, forward, backward = self.sweep.of_stage(positions)
        saved = {v for name in stage.ops for v in self.saves.get(name, ())}
        whole = sum(v.bytes for v in sent if self.wiring.is_whole(v))
        return Footprint(
            parameters=sum(p.bytes for p in parameters),
            trainable=sum(p.bytes for p in parameters if p.trainable),
            buffers=sum(graph.buffer[name].bytes for name in stages.buffers[index]),
            residuals=residuals,
            kept=sum(self.wiring.made_at(v) >= 0 and graph.producer[v] not in inside for v in saved),
            received=sum(size[v] for v in received),
            received_grads=sum(size[v] for v, back in received.items() if back),
            sent=sum(v.bytes for v in sent),
            sent_grads=sum(v.bytes for v in sent if v.needs_grad),
            whole=whole,
            largest=max((p.bytes for p in parameters if p.trainable), default=0),
            transient=(
                max(0.0, forward - residuals - whole),
                max(0.0, backward - residuals - sum(size[v] for v, back in received.items() if back)),
            ),
        )

    def _memory_parts(self, f: Footprint, in_flight: Any) -> dict[str, Any]:
        """Bytes by the kinds of `StageMemory` at the peak, elementwise."""
        forward, backward = self.moments(f, in_flight)
        earlier = forward.total >= backward.total
        held = f.residuals * in_flight
        boundary = np.where(earlier, forward.boundary, backward.boundary)
        transient = np.where(earlier, forward.transient, backward.transient)
        return self.static_parts(f, in_flight) | {
            "residuals": held,
            "boundary": boundary,
            "transient": transient + np.maximum(f.largest - held - boundary - transient, 0),
        }

    def static_parts(self, f: Footprint, in_flight: Any) -> dict[str, Any]:
        """Of these, what is there for the whole step."""
        batch = sum(value.bytes for value in self.graph.inputs) * self.options.microbatches
        return {
            "parameters": f.parameters * WEIGHT_POLICIES[self.options.weights].copies(in_flight),
            "gradients": f.trainable,
            "optimizer": f.trainable * self.options.optimizer_bytes,
            "buffers": f.buffers + batch,
        }

    def moments(self, f: Footprint, in_flight: Any) -> tuple[Moment, Moment]:
        """When most micro-batches are in flight: in the newest one's forward, in the backward after it."""
        options = self.options
        most, ahead = options.microbatches, options.receive_ahead
        forward, backward = f.transient if np.ndim(f.transient) else (f.transient, f.transient)
        kept = np.where(f.kept > 0, in_flight, 0)
        waiting = options.sends_in_flight * np.maximum(f.sent, f.received_grads)
        later = np.minimum(ahead, np.maximum(most - in_flight, 0))  # of those not yet begun
        here = (np.maximum(kept, 1) + later) * f.received
        there = (kept + later) * f.received
        return (
            Moment(here + min(ahead, most) * f.sent_grads + f.sent + waiting, forward),
            Moment(there + min(1 + ahead, most) * f.sent_grads + f.received_grads + waiting, backward),
        )

    def turn_s(self, stages: StageGraph, index: int) -> float:
        """Seconds that one micro-batch occupies a stage of any cut."""
        plan = self.stage(stages, index, 1)
        compute = plan.forward_s + plan.input_grad_s + plan.weight_grad_s
        return self.turn_of(self.footprint(stages, index), compute, index)

    def turn_of(self, footprint: Footprint, compute_s: float, rank: int) -> float:
        """The same for a stage of known footprint and computing time."""
        return float(self._turn_s(footprint, np.array([compute_s]), np.array([rank]))[0, 0])

    # --- intervals of ops -------------------------------------------------------------------------

    def row(self, start: int, ends: Indices, *, exact: bool = True) -> tuple[Footprint, Array]:
        """Footprints and compute times of the intervals [start, end), for ascending ends.

        exact: if not, `transient` is only an upper bound, which is faster.
        Returns the footprint with arrays over intervals, and seconds as (distinct profiles, intervals).
        """
        here = ends - start - 1
        stop = int(ends[-1])
        sums = self._sums.row(start, stop)
        held = sums[COLUMN["residuals"]]
        held += self._extra[start + 1 : stop + 1] - self._extra[start]
        largest = np.maximum.accumulate(self._largest[start:stop])[here]
        columns = {name: sums[index, here] for name, index in COLUMN.items()}
        if exact:
            _, forward, backward = self.sweep.of_intervals(start, ends)
            made = np.stack([columns["whole"], columns["received_grads"]]) + held[here]
            transient = np.maximum(np.stack([forward, backward]) - made, 0.0)
        else:
            ahead, back = self.sweep.bounds[:, start:stop]
            rising = np.maximum.accumulate(held + back) - held
            transient = np.stack([np.maximum.accumulate(ahead), rising])[:, here]
        seconds = self.prefix_s[:, ends] - self.prefix_s[:, start : start + 1]
        return Footprint(**columns, largest=largest, transient=transient), seconds + sums[len(COLUMN) :, here]

    def turns(self, footprint: Footprint, seconds: Array, ranks: Indices) -> Array:
        """Seconds that one micro-batch occupies each interval on each rank: (ranks, intervals)."""
        return self._turn_s(footprint, seconds[np.array(self.kind)[ranks]], ranks)

    def memory(self, footprint: Footprint, in_flight: Indices) -> Array:
        """Bytes of each interval with each count of micro-batches in flight: (counts, intervals)."""
        parts = self._memory_parts(footprint, in_flight[:, None])
        return np.asarray(sum(parts.values()), dtype=np.float64)

    def edges(self, footprint: Footprint, ranks: Indices) -> Array:
        """Seconds in transfers over the left edge of each interval on each rank: (ranks, intervals)."""
        f = footprint
        return self._edge_s(f.received, ranks, -1, 0) + self._edge_s(f.received_grads, ranks, 0, -1)

    @property
    def cut_points(self) -> Indices:
        """See `Wiring.cut_points`."""
        return self.wiring.cut_points

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

    def _turn_s(self, f: Footprint, compute: Array, ranks: Indices) -> Array:
        forward = self._edge_s(f.received, ranks, -1, 0)
        backward = self._edge_s(f.received_grads, ranks, 0, -1)
        if self.options.overlap:
            return np.maximum(compute, np.maximum(forward, backward))
        right = self._edge_s(f.sent, ranks, 0, 1) + self._edge_s(f.sent_grads, ranks, 1, 0)
        return compute + forward + backward + right

    def _edge_s(self, size: Any, ranks: Indices, source: int, target: int) -> Array:
        """Seconds to move `size` between neighbours, given as offsets to the rank: (ranks, intervals)."""
        latency, per_byte = self._links[source, target][:, ranks, None]
        return np.where(np.asarray(size) > 0, latency + size * per_byte, 0.0)

    @cached_property
    def _links(self) -> dict[tuple[int, int], Array]:
        """(source, target) offset -> latency and seconds per byte of each rank; 0 at the ends."""
        count = len(self.cluster.devices)
        found = {offsets: np.zeros((2, count)) for offsets in ((-1, 0), (0, -1), (0, 1), (1, 0))}
        for (source, target), costs in found.items():
            for rank in range(count):
                if 0 <= min(rank + source, rank + target) and max(rank + source, rank + target) < count:
                    link = self.cluster.link(rank + source, rank + target)
                    costs[:, rank] = link.latency_s, 1 / link.bandwidth_bytes_per_s
        return found

    @cached_property
    def prefix_s(self) -> Array:
        """Compute seconds of the first p ops, clones not counted: (distinct profiles, ops + 1)."""
        names = [op.name for op in self.wiring.ops]
        costs = [[p.costs[n].forward_s + p.costs[n].backward_s for n in names] for p in self.distinct]
        return np.concatenate([np.zeros((len(costs), 1)), np.cumsum(costs, axis=1)], axis=1)

    @cached_property
    def forward_s(self) -> Array:
        """Seconds of each op's forward: (distinct profiles, ops)."""
        return np.array([[p.costs[op.name].forward_s for op in self.wiring.ops] for p in self.distinct])

    @cached_property
    def cheap_s(self) -> Array:
        """Seconds in which cheap ops make each storage (see tensors.py): (distinct profiles, storages)."""
        graph, found = self.graph, np.zeros((len(self.distinct), len(self.sweep.tensors.names)))
        number = {name: index for index, name in enumerate(self.sweep.tensors.names)}
        before: dict[str, frozenset[str]] = {}
        for op in graph.ops:
            if op.cheap:
                makers = {graph.producer.get(v, "") for v in op.inputs}
                before[op.name] = frozenset({op.name}).union(*(before.get(m, frozenset()) for m in makers))
                for value in op.outputs:
                    if value.name in number:
                        for kind, profile in enumerate(self.distinct):
                            took = sum(profile.costs[name].forward_s for name in before[op.name])
                            found[kind, number[value.name]] = took
        return found

    @cached_property
    def _extra(self) -> Array:
        extra = [self.profile.costs[op.name].extra_saved_bytes for op in self.wiring.ops]
        return np.concatenate([[0.0], np.cumsum(extra, dtype=np.float64)])

    @cached_property
    def _largest(self) -> Array:
        """Per op the bytes of the largest trainable parameter that it reads; unused ones are the first's."""
        found = np.zeros(len(self))
        for parameter in self.graph.parameters:
            if parameter.trainable:
                users = list(self.wiring.users[parameter.name] or (0,))
                found[users] = np.maximum(found[users], parameter.bytes)
        return found

    @cached_property
    def sweep(self) -> Sweep:
        return Sweep(tensors_of(self.wiring, self.saves, self.profile))

    @cached_property
    def _sums(self) -> IntervalSums:
        clones = [{name: c.forward_s for name, c in p.costs.items()} for p in self.distinct]
        terms = interval_terms(self.wiring, self.saves, COLUMN, clones)
        return IntervalSums(len(self), len(COLUMN) + len(self.distinct), terms)
