"""The one cost model of all planners: what a stage takes, and the bytes from which its peak is predicted.

Time of a stage for one micro-batch: forward plus backward of its ops. Transfers overlap with compute, so the
stage's turn lasts as long as the longest of compute, receiving its inputs, and returning their gradients
(links carry both directions at once).

Memory of a stage: its `Footprint`, from which `peak_memory.py` predicts the peak.

The same numbers come out for any stage (`stage_footprint`) and, fast, for all intervals of ops with one start
(`row`); a test holds the two together. They differ in one point: a value that several later stages read is
counted once among the messages of an interval of ops; for a stage of a cut, and in the simulator, each
message counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...ir.cluster import Cluster
from ...ir.graph import OpGraph, step_bytes
from ...ir.profile import Profile
from ...ir.stages import StageGraph
from .equal_stretches import EqualStretches
from .interval_sums import IntervalSums, interval_terms
from .liveness import LivenessSweep, SplitBackward
from .peak_memory import CostOptions, Footprint, peak_bytes
from .tensors import Array, Indices, Readers, find_saved_storages, tensors_of

SUMMED = (
    "parameters",
    "gradients",
    "state",
    "together",
    "buffers",
    "residuals",
    "saved_inputs",
    "received",
    "received_grads",
    "sent",
    "sent_grads",
    "whole",
)
"""What is summed over distinct things for a footprint, in the order of its columns: fields of it, and the
scratch of parameters that the optimizer updates together."""

COLUMN = {name: index for index, name in enumerate(SUMMED)}


class GraphTables:
    """What depends on a graph, its profiles and the order of ops alone: cost models for other devices and
    options share it.

    distinct: profiles; bytes are read from the first.  order: see `CostModel`.  forward: `in_forward_order`,
    if there is one already.
    """

    def __init__(
        self,
        graph: OpGraph,
        distinct: Sequence[Profile],
        order: tuple[int, ...] = (),
        forward: GraphTables | None = None,
    ) -> None:
        self.graph, self.distinct, self._forward = graph, distinct, forward
        self.readers = Readers(graph, order)
        self.saves: dict[str, tuple[str, ...]] = find_saved_storages(self.readers, distinct[0])
        self.splits: dict[Sequence[int], SplitBackward] = {}

    def __len__(self) -> int:
        return len(self.readers.ops)

    @cached_property
    def in_forward_order(self) -> GraphTables:
        if not self.readers.order:
            return self
        return GraphTables(self.graph, self.distinct) if self._forward is None else self._forward

    @cached_property
    def sweep(self) -> LivenessSweep:
        return LivenessSweep(tensors_of(self.readers, self.saves, self.distinct[0]))

    @cached_property
    def equal(self) -> EqualStretches:
        costs = [[p.costs[op.name] for p in self.distinct] for op in self.readers.ops]
        parts = [tuple((c.forward_s, c.input_grad_s, c.weight_grad_s) for c in each) for each in costs]
        return EqualStretches(self.sweep.tensors, self.sums, parts)

    @cached_property
    def sums(self) -> IntervalSums:
        clones = [{name: c.forward_s for name, c in p.costs.items()} for p in self.distinct]
        terms = interval_terms(self.readers, self.saves, COLUMN, clones)
        return IntervalSums(len(self), len(COLUMN) + len(self.distinct), terms)

    @cached_property
    def crossing_bytes(self) -> Array:
        """Bytes of the values that cross a cut in front of op p, for p = 0 .. number of ops."""
        change = np.zeros(len(self) + 1)
        for name, value in self.graph.value.items():
            made, readers = self.readers.produced_at(name), self.readers.value_readers(name)
            if made >= 0 and readers:
                change[made + 1] += value.bytes
                change[readers[-1] + 1] -= value.bytes
        return np.cumsum(change)

    @cached_property
    def prefix_s(self) -> Array:
        """Compute seconds of the first p ops, clones not counted: (distinct profiles, ops + 1)."""
        names = [op.name for op in self.readers.ops]
        costs = [[p.costs[n].forward_s + p.costs[n].backward_s for n in names] for p in self.distinct]
        return np.concatenate([np.zeros((len(costs), 1)), np.cumsum(costs, axis=1)], axis=1)

    @cached_property
    def prefix_parts_s(self) -> Array:
        """The same of forwards, and of gradients of inputs and weights: (3, distinct profiles, ops + 1)."""
        names = [op.name for op in self.readers.ops]
        each = [[p.costs[name] for name in names] for p in self.distinct]
        parts = [
            [[getattr(cost, part) for cost in costs] for costs in each]
            for part in ("forward_s", "input_grad_s", "weight_grad_s")
        ]
        return np.concatenate([np.zeros((3, len(each), 1)), np.cumsum(parts, axis=2)], axis=2)

    @cached_property
    def forward_s(self) -> Array:
        """Seconds of each op's forward: (distinct profiles, ops)."""
        return np.array([[p.costs[op.name].forward_s for op in self.readers.ops] for p in self.distinct])

    @cached_property
    def cheap_s(self) -> Array:
        """Seconds in which cheap ops make each storage (see tensors.py): (distinct profiles, storages)."""
        graph, seconds = self.graph, np.zeros((len(self.distinct), len(self.sweep.tensors.names)))
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
                            seconds[kind, number[value.name]] = took
        return seconds

    @cached_property
    def extra(self) -> Array:
        extra = [self.distinct[0].costs[op.name].extra_saved_bytes for op in self.readers.ops]
        return np.concatenate([[0.0], np.cumsum(extra, dtype=np.float64)])

    @cached_property
    def step_alone(self) -> Array:
        """Per op the most scratch of the update of a parameter that it reads; unused ones are the first's."""
        most = np.zeros(len(self))
        for parameter in self.graph.parameters:
            if parameter.trainable and not parameter.update.together:
                at = list(self.readers.state_readers[parameter.name] or (0,))
                most[at] = np.maximum(most[at], parameter.update.step)
        return most


def distinct_profiles(profiles: Sequence[Profile]) -> list[Profile]:
    """Those of a row of profiles, each once."""
    return list({id(profile): profile for profile in profiles}.values())


class CostModel:
    """Costs of stages of one graph, stage s on device s of a cluster.

    profiles: one per stage; bytes are read from the first.  order: of the ops whose intervals are asked for
        (see `Readers`); () for that in which the forward runs them.  ranks: of each stage; s of stage s by
        default.  tables: those of the same graph, profiles and order, made unless given.
    """

    def __init__(
        self,
        graph: OpGraph,
        profiles: Sequence[Profile],
        cluster: Cluster,
        options: CostOptions,
        order: tuple[int, ...] = (),
        *,
        ranks: Sequence[int] = (),
        tables: GraphTables | None = None,
    ) -> None:
        self.graph = graph
        self.profiles = profiles
        self.cluster = cluster
        self.options = options
        self.ranks = tuple(ranks) or tuple(range(len(cluster.devices)))
        self.profile = profiles[0]
        self.distinct = distinct_profiles(profiles)
        self.kind = [next(k for k, p in enumerate(self.distinct) if p is own) for own in profiles]
        self.tables = GraphTables(graph, self.distinct, order) if tables is None else tables
        self.readers, self.saves = self.tables.readers, self.tables.saves
        self._weighed: dict[Hashable, tuple[Footprint[float], list[float]]] = {}

    def __len__(self) -> int:
        """How many ops there are to assign."""
        return len(self.readers.ops)

    @cached_property
    def in_forward_order(self) -> CostModel:
        """The same with the ops in the order in which a stage runs them: for stages of any cut."""
        if not self.readers.order:
            return self
        tables = self.tables.in_forward_order
        return CostModel(
            self.graph, self.profiles, self.cluster, self.options, ranks=self.ranks, tables=tables
        )

    @property
    def cut_points(self) -> Indices:
        return self.readers.cut_points

    def split_backward(self, positions: Sequence[int]) -> SplitBackward:
        """What I and W of a stage of these ops (ascending) hold, with everything kept; remembered."""
        whole = range(positions[0], positions[-1] + 1)
        key = whole if len(whole) == len(positions) else tuple(positions)
        known = self.tables.splits
        if key not in known:
            known[key] = self.tables.sweep.split_backward(key)
        return known[key]

    def positions(self, stages: StageGraph, index: int) -> list[int]:
        """Of the stage's ops, ascending; cheap ones have none."""
        position = self.readers.position
        return [position[name] for name in stages.stages[index].ops if name in position]

    def stage_seconds(self, stages: StageGraph, index: int) -> tuple[float, float, float]:
        """Of one stage of any cut: the forward, and the backward's gradients of inputs and of weights."""
        stage = stages.stages[index]
        costs = self.distinct[self.kind[index]].costs
        assigned = [costs[name] for name in stage.ops if name in self.readers.position]
        cheap = [name for name in (*stage.ops, *stage.clones) if self.graph.op[name].cheap]
        return (
            sum(c.forward_s for c in assigned) + sum(costs[name].forward_s for name in cheap),
            sum(c.input_grad_s for c in assigned),
            sum(c.weight_grad_s for c in assigned),
        )

    def stage_footprint(self, stages: StageGraph, index: int, *, once: bool = False) -> Footprint[float]:
        """Bytes of one stage of any cut.

        once: a value that several stages read counts once, as for an interval whose readers may be anywhere.
        """
        graph, readers = self.graph, self.readers
        stage = stages.stages[index]
        inside = {*stage.ops, *stage.clones}
        parameters = [graph.parameter[name] for name in stages.params[index]]
        received = {c.value.name: c.value.needs_grad for c in stages.crossings if c.target == index}
        crossing = [c.value for c in stages.crossings if c.source == index]
        distinct = {v.name: v for v in sorted(crossing, key=lambda v: v.needs_grad)}
        sent = list(distinct.values()) if once else crossing
        size = {name: graph.value[name].bytes for name in received}
        received_grads = sum(size[v] for v, back in received.items() if back)
        residuals, forward, backward = self.tables.sweep.of_stage(self.positions(stages, index))
        saved = {v for name in stage.ops for v in self.saves.get(name, ())}
        whole = sum(v.bytes for v in sent if readers.is_whole(v))
        return Footprint(
            parameters=sum(p.kept_bytes for p in parameters),
            gradients=sum(p.gradient_bytes for p in parameters if p.trainable),
            state=sum(p.update.state for p in parameters if p.trainable),
            buffers=sum(graph.buffer[name].bytes for name in stages.buffers[index]) + self.batch_bytes,
            residuals=residuals,
            saved_inputs=sum(readers.produced_at(v) >= 0 and graph.producer[v] not in inside for v in saved),
            received=sum(size[v] for v in received),
            received_grads=received_grads,
            sent=sum(v.bytes for v in sent),
            sent_grads=sum(v.bytes for v in sent if v.needs_grad),
            whole=whole,
            step=step_bytes(p.update for p in parameters if p.trainable),
            forward_transient=max(0.0, forward - residuals - whole),
            backward_transient=max(0.0, backward - residuals - received_grads),
        )

    @cached_property
    def batch_bytes(self) -> int:
        """The inputs of all micro-batches of the steps that are under way at once."""
        options = self.options
        return sum(value.bytes for value in self.graph.inputs) * options.microbatches * options.batches

    def turn_of(self, footprint: Footprint[float], compute_s: float, rank: int) -> float:
        return float(self._turn_s(footprint, np.array([compute_s]), np.array([rank]))[0, 0])

    def row(self, start: int, ends: Indices, *, exact: bool = True) -> tuple[Footprint[Array], Array]:
        """Footprints and compute times of the intervals [start, end), for ascending ends.

        exact: if not, transient bytes are only an upper bound, which is faster.
        Returns: the footprint with arrays over intervals, and seconds as (distinct profiles, intervals).
        """
        here = ends - start - 1
        stop = int(ends[-1])
        sums = self.tables.sums.row(start, stop)
        residuals = sums[COLUMN["residuals"]]
        residuals += self.tables.extra[start + 1 : stop + 1] - self.tables.extra[start]
        columns = {name: sums[index, here] for name, index in COLUMN.items()}
        columns["buffers"] += self.batch_bytes
        alone = np.maximum.accumulate(self.tables.step_alone[start:stop])[here]
        columns["step"] = np.maximum(alone, columns.pop("together"))
        if exact:
            _, forward, backward = self.tables.sweep.of_intervals(start, ends)
            columns["forward_transient"] = np.maximum(forward - columns["whole"] - residuals[here], 0.0)
            columns["backward_transient"] = np.maximum(
                backward - columns["received_grads"] - residuals[here], 0.0
            )
        else:
            forward, backward = self.tables.sweep.bounds[:, start:stop]
            # In the backward of op p the residuals of [start, p] are left, and what comes on top of those of
            # the whole interval is transient.
            rising = np.maximum.accumulate(residuals + backward) - residuals
            columns["forward_transient"] = np.maximum.accumulate(forward)[here]
            columns["backward_transient"] = rising[here]
        prefix = self.tables.prefix_s
        seconds = prefix[:, ends] - prefix[:, start : start + 1] + sums[len(COLUMN) :, here]
        return Footprint(**columns), seconds

    def interval(self, start: int, end: int) -> tuple[Footprint[float], list[float]]:
        """Footprint and compute times by distinct profile of [start, end); of equal stretches made once."""
        key = self.tables.equal.key(start, end)
        if key not in self._weighed:
            row, seconds = self.row(start, np.array([end]))
            self._weighed[key] = row.at(0), seconds[:, 0].tolist()
        return self._weighed[key]

    def turns(self, footprint: Footprint[Array], seconds: Array, ranks: Indices) -> Array:
        """Seconds that one micro-batch occupies each interval on each rank: (ranks, intervals)."""
        return self._turn_s(footprint, seconds[np.array(self.kind)[ranks]], ranks)

    def peaks(self, footprint: Footprint[Array], in_flight: Indices) -> Array:
        """Peak bytes of each interval with each count of micro-batches in flight: (counts, intervals)."""
        return np.asarray(peak_bytes(footprint, self.options, in_flight[:, None]), dtype=np.float64)

    def edges(self, footprint: Footprint[Array], ranks: Indices) -> Array:
        """Seconds in transfers over the left edge of each interval on each rank: (ranks, intervals)."""
        received, returned = self._edge_s(footprint, ranks)
        return received + returned

    def _turn_s(self, footprint: Footprint[Any], compute: Array, ranks: Indices) -> Array:
        return np.maximum(compute, np.maximum(*self._edge_s(footprint, ranks)))

    def _edge_s(self, f: Footprint[Any], ranks: Indices) -> list[Array]:
        """Seconds of what comes over the left edge, and of its gradients: each (ranks, intervals)."""
        both = zip((f.received, f.received_grads), self._links[:, :, ranks, None], strict=True)
        return [
            np.where(np.asarray(size) > 0, latency + size * per_byte, 0.0)
            for size, (latency, per_byte) in both
        ]

    @cached_property
    def _links(self) -> Array:
        """From the rank in front and back to it, latency and seconds per byte: (2, 2, ranks)."""
        links = np.zeros((2, 2, len(self.cluster.devices)))
        for rank in range(1, len(self.cluster.devices)):
            for way, ends in enumerate(((rank - 1, rank), (rank, rank - 1))):
                link = self.cluster.link(*ends)
                links[way, :, rank] = link.latency_s, 1 / link.bandwidth_bytes_per_s
        return links
