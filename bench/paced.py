"""Paced ranks: the real worker and real messages, but stages that sleep instead of computing.

So a schedule for many ranks runs in real time on few cores, and what it takes can be held against a
simulation of the same program with the same times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeloom.ir.action import RECOMPUTE, B, F, I, Kind, W, parse_action
from pipeloom.ir.costs import StageCost
from pipeloom.ir.graph import Value
from pipeloom.ir.schedule import Program
from pipeloom.ir.stages import StageGraph
from pipeloom.ir.steady import SteadyStep
from pipeloom.ir.timeline import Timeline
from pipeloom.ir.weight_policies import Updates
from pipeloom.lowering.steady import SteadyRows
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.file_tier import FileCopy, FileTier
from pipeloom.runtime.ledger import Ledger
from pipeloom.runtime.rank import Microbatch, Rank, Variant
from pipeloom.runtime.recorder import HostClock, Recorder
from pipeloom.runtime.reduce_and_step import shared_by
from pipeloom.runtime.tier import Tier
from pipeloom.runtime.transport import PendingTransfer, SumGroup
from pipeloom.runtime.watch import Watch
from pipeloom.runtime.weights import Weights
from pipeloom.steady_run import SteadyRun
from pipeloom.step_reports import StepRecord
from pipeloom.tracer.stage.functions import Sink, Slot, StageFunctions, Tensors
from pipeloom.tracer.tensors import zeros_like_value

_LOSS, _KEPT = "loss", "kept"


@dataclass(kw_only=True, eq=False)
class PacedFunctions(StageFunctions):
    """A stage that takes its time and makes zeros; see `tracer.stage.functions.StageFunctions`.

    cost: how long each function takes, and how many `offloaded_bytes` there are of the one residual, which
        may leave.  inputs, outputs: crossing values.
    """

    cost: StageCost
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

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
        kept = torch.empty(self.cost.offloaded_bytes, dtype=torch.uint8)
        residuals = {Slot("residual", name): kept for name in self.offloaded}
        return (made if self.loss is None else {**made, self.loss: torch.zeros(())}), residuals

    def recompute(self, state: Mapping[str, Tensor], residuals: Tensors) -> Tensors:
        self._take(RECOMPUTE)
        return {}

    def backward(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor], sink: Sink
    ) -> dict[str, Tensor]:
        residuals.clear()
        return self._input_grads(B)

    def backward_input(
        self, state: Mapping[str, Tensor], residuals: Tensors, grads: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensors]:
        residuals.clear()
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
        offloaded=frozenset({_KEPT} if costs[index].offloaded_bytes else ()),
    )


class PacedTier(FileTier):
    """A file whose copies take the time that costs say, and the little that small residuals really take.

    costs: one per stage.
    """

    def __init__(self, directory: Path, rank: int, costs: Sequence[StageCost]) -> None:
        self._costs = costs
        super().__init__(directory, rank)

    def _write(self, copy: FileCopy) -> None:
        time.sleep(self._costs[parse_action(copy.action).stage].offload_s)
        super()._write(copy)

    def _read_back(self, copy: FileCopy) -> None:
        time.sleep(self._costs[parse_action(copy.action).stage].reload_s)
        super()._read_back(copy)


class PacedRank:
    """One rank of a paced program. All ranks, on one machine, make one and call it the same number of times.

    The optimizer takes no time, as there is nothing to update.
    tier: where residuals go, if the program offloads any.
    """

    def __init__(
        self,
        program: Program,
        stages: StageGraph,
        costs: Sequence[StageCost],
        channel: Channel,
        watch: Watch,
        *,
        tier: Tier | None = None,
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
        self.worker = Rank(
            program=program,
            weights=Weights({}, {}, None),
            channel=channel,
            ledger=Ledger(channel.rank),
            recorder=self.recorder,
            watch=watch,
            tier=tier,
        )

    def step(self) -> Timeline:
        """Run one step; returns what all ranks did, in seconds since the first of them began."""
        self.channel.all_reduce(torch.zeros(1))  # so that they begin together
        self.recorder.next_step()
        self.worker.run(self.microbatches)
        begun = self.recorder.started_s
        seen = self.channel.all_gather_object((begun, self.recorder.events()))
        first = min(zero for zero, _ in seen)
        events = tuple(
            replace(e, start_s=e.start_s + zero - first, end_s=e.end_s + zero - first)
            for zero, events in seen
            for e in events
        )
        return Timeline(source="measured", ranks=self.channel.ranks, events=events, memory=(), peaks=())


class _SlowSum:
    """The handle of a sum that takes at least so long."""

    def __init__(self, transfer: PendingTransfer, seconds: float) -> None:
        self._transfer, self._until = transfer, time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self._until and self._transfer.done()

    def wait(self, timeout_s: float) -> None:
        self._transfer.wait(timeout_s)
        time.sleep(max(0.0, self._until - time.monotonic()))


class PacedSteadyRank:
    """One rank of a paced pipeline that does not drain between its steps.

    Parameters have one number each; what takes time are the stages, and the sums of gradients: `sum_s`.
    """

    def __init__(
        self,
        step: SteadyStep,
        stages: StageGraph,
        costs: Sequence[StageCost],
        channel: Channel,
        watch: Watch,
        *,
        updates: Updates,
        clips: bool = False,
        sum_s: float = 0.0,
    ) -> None:
        own = [s for s, rank in enumerate(step.placement) if rank == channel.rank]
        functions = {s: paced_functions(stages, costs, s) for s in own}
        names = dict.fromkeys(name for s in own for name in stages.params[s])
        rows = SteadyRows(step=step, stages=stages, updates=updates, clips=clips)
        self._slow_down_sums(channel, sum_s)
        self.recorder, ledger = Recorder(channel.rank, HostClock()), Ledger(channel.rank)
        weights = Weights(
            {name: nn.Parameter(torch.zeros(1)) for name in names},
            {},
            lambda params: torch.optim.SGD(params, lr=0.1),
            updates=replace(updates, kept=2),
            awaited=clips or bool(stages.tied),
            together=[r.names for r in shared_by(stages, step.placement, channel.rank, ())],
        )
        self.worker = Rank(
            program=rows.row(0, 0).program,
            weights=weights,
            channel=channel,
            ledger=ledger,
            recorder=self.recorder,
            watch=watch,
            clip_norm=1.0 if clips else None,
        )
        record = StepRecord(
            channel=channel, recorder=self.recorder, ledger=ledger, device=torch.device("cpu")
        )
        self.run = SteadyRun(
            batches=None,  # its micro-batches are made here
            worker=self.worker,
            record=record,
            rows=rows,
        )
        channel.open_groups(self.run.groups(stages, step.placement))
        variant = Variant(stages=stages, functions=functions)
        self._part = Microbatch(variant=variant, inputs={}, weight=1.0, seed=0)
        self._channel = channel

    def steady_s(self, steps: int) -> float:
        """Seconds from one step to the next on the slowest rank, over `steps` of them after two that fill the
        pipeline."""
        every, count = (
            self.run.rows.step.microbatches,
            self.run.rows.stages.replicas * self.run.rows.step.microbatches,
        )
        starts = []
        self._channel.all_reduce(torch.zeros(1))  # so that they begin together
        for number in range(steps + 3):
            parts = [replace(self._part, number=number * every + index % every) for index in range(count)]
            starts.append(time.perf_counter())
            self.run.run_row(number, parts, 0)
        self.run.drain()
        mine = (starts[-1] - starts[2]) / steps
        return max(self._channel.all_gather_object(mine))

    def _slow_down_sums(self, channel: Channel, seconds: float) -> None:
        transport = channel._transport
        begin = transport.all_reduce

        def all_reduce(tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
            transfer = begin(tensor, group)
            return (
                _SlowSum(transfer, seconds) if group is not None and "gradients" in group.name else transfer
            )

        transport.all_reduce = all_reduce  # type: ignore[method-assign]
