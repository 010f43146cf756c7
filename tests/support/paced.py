"""Paced ranks: the real worker and real messages, but stages that sleep instead of computing.

So a schedule for many ranks runs in real time on few cores, and what it takes can be held against a
simulation of the same program with the same times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipeloom.ir.action import RECOMPUTE, B, F, I, Kind, W
from pipeloom.ir.costs import StageCost
from pipeloom.ir.graph import Value
from pipeloom.ir.schedule import Program
from pipeloom.ir.stages import StageGraph
from pipeloom.ir.timeline import Timeline
from pipeloom.runtime import (
    HostClock,
    Ledger,
    Microbatch,
    PostedChannel,
    Recorder,
    Variant,
    Watch,
    Weights,
    Worker,
)
from pipeloom.tracer import Sink, StageFunctions, Tensors, zeros_like_value

_LOSS = "loss"


@dataclass(kw_only=True, eq=False)
class PacedFunctions:
    """A stage that takes its time and makes zeros; see `tracer.stage.functions.StageFunctions`.

    cost: how long each function takes.  inputs, outputs: crossing values.
    """

    index: int
    cost: StageCost
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    loss: str | None = None
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    received: tuple[str, ...] = field(init=False)
    sent: tuple[str, ...] = field(init=False)
    residual_bytes: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, Tensor] = field(default_factory=dict)
    offloaded: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()
    kept_inputs: frozenset[str] = frozenset()
    differentiable: bool = True
    carried_bytes: int = 0

    def __post_init__(self) -> None:
        self.received = tuple(value.name for value in self.inputs)
        self.sent = tuple(value.name for value in self.outputs)

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        return dict.fromkeys(("forward", "recompute", "backward", "input_grad", "weight_grad"), 0)

    def forward(
        self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], seed: int
    ) -> tuple[dict[str, Tensor], Tensors]:
        self._take(F)
        made = {value.name: zeros_like_value(value) for value in self.outputs}
        return (made if self.loss is None else {**made, self.loss: torch.zeros(())}), {}

    def recompute(self, state: Mapping[str, Tensor], residuals: Tensors) -> Tensors:
        self._take(RECOMPUTE)
        return {}

    def backward(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor], sink: Sink
    ) -> dict[str, Tensor]:
        return self._input_grads(B)

    def backward_input(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensors]:
        return self._input_grads(I), {}

    def backward_weight(self, state: Mapping[str, Tensor], carried: Tensors, sink: Sink) -> None:
        self._take(W)

    def evaluate(self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.forward(state, inputs, 0)[0]

    def _input_grads(self, kind: Kind) -> dict[str, Tensor]:
        self._take(kind)
        return {value.name: zeros_like_value(value) for value in self.inputs if value.needs_grad}

    def _take(self, kind: Kind) -> None:
        time.sleep(self.cost.seconds(kind))


def paced_functions(stages: StageGraph, costs: Sequence[StageCost], index: int) -> StageFunctions:
    """One stage of a graph, or of its replicas. costs: one per stage."""
    sent = {v.name: v for s in stages.successors[index] for v in stages.between[index, s]}
    return PacedFunctions(
        index=index,
        cost=costs[index],
        inputs=tuple(v for s in stages.predecessors[index] for v in stages.between[s, index]),
        outputs=tuple(sent.values()),
        loss=_LOSS if stages.origin(index) == stages.loss_stage else None,
    )


class PacedRank:
    """One rank of a paced program. All ranks, on one machine, make one and call it the same number of times.

    The optimizer takes no time, as there is nothing to update.
    """

    def __init__(
        self,
        program: Program,
        stages: StageGraph,
        costs: Sequence[StageCost],
        channel: PostedChannel,
        watch: Watch,
    ) -> None:
        own = [s for s, rank in enumerate(program.placement) if rank == channel.rank]
        functions = {s: paced_functions(stages, costs, s) for s in own}
        count = program.microbatches * stages.replicas
        self.microbatches = [
            Microbatch(
                variant=Variant(stages=stages, functions=functions), inputs={}, weight=1 / count, seed=0
            )
        ] * count
        self.channel = channel
        self.recorder = Recorder(channel.rank, HostClock())
        self.worker = Worker(
            rank=channel.rank,
            program=program,
            weights=Weights({}, {}, None),
            channel=channel,
            ledger=Ledger(channel.rank),
            recorder=self.recorder,
            watch=watch,
        )

    def step(self) -> Timeline:
        """Run one step; returns what all ranks did, in seconds since the first of them began."""
        self.channel.all_reduce(torch.zeros(1))  # so that they begin together
        self.recorder.begin()
        self.worker.run(self.microbatches)
        begun = self.recorder.clock.seconds(self.recorder.zero)
        seen = self.channel.all_gather_object((begun, self.recorder.events()))
        first = min(zero for zero, _ in seen)
        events = tuple(
            replace(e, start_s=e.start_s + zero - first, end_s=e.end_s + zero - first)
            for zero, events in seen
            for e in events
        )
        return Timeline(source="measured", ranks=self.channel.ranks, events=events, memory=(), peaks=())
