"""How long this rank's actions take, from running its row of the program without the other ranks.

The worker itself runs it, so that micro-batches are in flight as in a step: a stage that alternates between
them finds less of its data in the caches than one that repeats one of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...ir.action import KINDS, STEP, Action, B, I, Kind, W, parse_action
from ...ir.costs import StageCost
from ...ir.graph import Value
from ...ir.schedule import Program
from ...tracer import view_in_order, zeros_like_value
from ..failure import Watch
from ..ledger import Ledger
from ..messages import Message
from ..offload import Tier
from ..recorder import Clock, Recorder
from ..step_state import Microbatch, Variant
from ..weights import Weights
from ..worker import Worker

ActionTimes = dict[Action, float]
"""Seconds of each of a rank's compute actions and copies."""

COPIES = ("d2h", "h2d")
"""Streams that run beside the actions."""


class NullChannel:
    """A `Channel` that answers by itself: what it receives is made up, what it sends is dropped.

    examples: values by name, for those that may not be just any numbers, such as indices.
    """

    sending_bytes = 0

    def __init__(self, rank: int, ranks: int, examples: Mapping[str, Tensor], device: torch.device) -> None:
        self.rank = rank
        self.ranks = ranks
        self.used_bytes = 0
        self._examples = examples
        self._device = device
        # Of its own: what the user draws between two steps must not depend on rehearsals.
        self._generator = torch.Generator(device)

    def begin(self, incoming: Sequence[Message]) -> None:
        pass

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        pass

    def receive(self, message: Message) -> list[Tensor]:
        self.used_bytes += message.bytes
        return [self._make(value) for value in message.values]

    def opening_bytes(self, message: Message) -> int:
        return 0

    def finish_send(self) -> bool:
        return False

    def release(self, message: Message) -> None:
        self.used_bytes -= message.bytes

    def end(self) -> None:
        pass

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int] | None = None) -> None:
        pass

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.ranks

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def _make(self, value: Value) -> Tensor:
        example = self._examples.get(value.name)
        if example is not None and tuple(example.shape) == value.shape:
            return example.to(self._device, copy=True)
        dtype = getattr(torch, value.dtype)
        if not dtype.is_floating_point:
            return zeros_like_value(value, self._device)
        row = torch.randn(prod(value.shape), device=self._device, generator=self._generator)
        return view_in_order(row.mul_(0.1).to(dtype), value.shape, value.order)


class Rehearsal:
    """Runs a rank's row as often as asked, between any two steps, and leaves no trace in its weights.

    sample: the batch inputs of one micro-batch.  cap_bytes: what the rank may hold, in a rehearsal too.
    """

    def __init__(
        self,
        program: Program,
        variant: Variant,
        sample: Mapping[str, Tensor],
        weights: Weights,
        *,
        rank: int,
        clock: Clock,
        watch: Watch,
        tier: Tier | None = None,
        cap_bytes: int | None = None,
    ) -> None:
        device = next(iter(sample.values())).device
        examples = {k: v for functions in variant.functions.values() for k, v in functions.examples.items()}
        self._weights = weights
        self._watch = watch
        self._recorder = Recorder(rank, clock)
        self.ledger = Ledger(rank, cap_bytes)
        self.ledger.set("batch", sum(t.nbytes for t in sample.values()))
        self.worker = Worker(
            rank=rank,
            program=program,
            weights=weights,
            ledger=self.ledger,
            recorder=self._recorder,
            watch=watch,
            channel=NullChannel(rank, len(program.rows), examples, device),
            tier=tier,
        )
        count = program.microbatches * variant.stages.replicas
        self._microbatches = [
            Microbatch(variant=variant, inputs=sample, weight=1 / count, seed=index) for index in range(count)
        ]

    def time_actions(self) -> ActionTimes:
        """Do all actions of the row once; weights, buffers, optimizer and random numbers stay as they are.

        An action takes until the rank goes on to the next one, so what the worker does between them counts.
        The sums of gradients are used, and empty again in the end, as they are between two steps.
        """
        assert not self._weights.grads.touched, "a rehearsal within a step would add to its gradients"
        buffers = dict(self._weights.buffers)
        for kind, size in self._weights.sizes.items():
            self.ledger.set(kind, size)
        self._recorder.begin()
        try:
            self.worker.run(self._microbatches, update=False)
        finally:
            self.worker.forget()
            for name, buffer in buffers.items():
                self._weights.replace_buffer(name, buffer)
        times_s = {
            parse_action(event.action): after.start_s - event.start_s
            for event, after in pairwise(e for e in self._recorder.events() if e.stream not in COPIES)
            if event.stream == "compute"
        }
        times_s |= {
            parse_action(event.action): event.duration_s
            for event in self._recorder.events()
            if event.stream in COPIES
        }
        self._watch.status = ""
        return times_s


def with_times(cost: StageCost, stage: int, times_s: ActionTimes, step_s: float) -> StageCost:
    """The cost of a stage with mean times; an action that the program lacks takes none.

    step_s: seconds of the optimizer for this stage.
    """
    spans: dict[Kind, list[float]] = {}
    for action, span in times_s.items():
        if action.stage == stage:
            spans.setdefault(action.kind, []).append(span)
    mean = {kind: statistics.fmean(took) for kind, took in spans.items()}
    mean.setdefault(B, mean.get(I, 0.0) + mean.get(W, 0.0))
    mean[STEP] = step_s
    fields: dict[str, Any] = {row.seconds: mean.get(kind, 0.0) for kind, row in KINDS.items() if row.seconds}
    return replace(cost, **fields, other_s={k: span for k, span in mean.items() if not KINDS[k].seconds})
