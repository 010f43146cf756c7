"""How long this rank's actions take, from walking its row of the program without the other ranks.

The worker itself walks, so that micro-batches are in flight as in a step: a stage that alternates between
them finds less of its data in the caches than one that repeats one of them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..ir.action import Action, B, F, I, Kind, W, parse_action
from ..ir.costs import StageCost
from ..ir.graph import Value
from ..ir.operation import OPERATIONS
from ..ir.schedule import Program
from .channel import Message
from .failure import Watch
from .ledger import Ledger
from .recorder import Clock, Recorder
from .weights import Weights
from .worker import Microbatch, Variant, Worker

WALKS = 3
"""Of which the first warms up."""

KEPT = 100

ENOUGH_S = 1.0
"""Shorter walks are repeated until this much time has passed."""

Spans = dict[tuple[int, Kind], list[float]]
"""(stage, kind of action) -> seconds of each time it was done, at most `KEPT` of them."""


class MadeUp:
    """A `Channel` that answers by itself: what it receives is made up, what it sends is dropped.

    examples: values by name, for those that may not be just any numbers, such as indices.
    """

    held_bytes = 0
    sending_bytes = 0

    def __init__(self, rank: int, ranks: int, examples: Mapping[str, Tensor], device: torch.device) -> None:
        self.rank = rank
        self.ranks = ranks
        self._examples = examples
        self._device = device

    def begin(self, incoming: Sequence[Message]) -> None:
        pass

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        pass

    def receive(self, message: Message) -> list[Tensor]:
        return [self._make(value) for value in message.values]

    def release(self, message: Message) -> None:
        pass

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
        if dtype.is_floating_point:
            return torch.randn(value.shape, device=self._device).mul_(0.1).to(dtype)
        return torch.zeros(value.shape, dtype=dtype, device=self._device)


def time_actions(
    program: Program, variant: Variant, sample: Mapping[str, Tensor], weights: Weights,
    *, rank: int, clock: Clock, watch: Watch,
) -> Spans:  # fmt: skip
    """Times of the actions of this rank's stages. Leaves the weights as they are.

    An action takes until the rank goes on to the next one, so what the worker does between them counts.

    sample: the batch inputs of one micro-batch.
    """
    device = next(iter(sample.values())).device
    examples = {k: v for functions in variant.functions.values() for k, v in functions.examples.items()}
    recorder = Recorder(rank, clock)
    worker = Worker(
        rank=rank, program=program, weights=weights, ledger=Ledger(rank), recorder=recorder, watch=watch,
        channel=MadeUp(rank, len(program.rows), examples, device),
    )  # fmt: skip
    count = program.microbatches * variant.stages.replicas
    microbatches = [
        Microbatch(variant=variant, inputs=sample, weight=1 / count, seed=index) for index in range(count)
    ]
    buffers = dict(weights.buffers)
    found: Spans = {}
    start, walks = time.perf_counter(), 0
    while walks < WALKS or time.perf_counter() - start < ENOUGH_S:
        recorder.begin()
        worker.run(microbatches, update=False)
        for event, after in pairwise(recorder.events() if walks else ()):
            if event.stream == "compute":
                action = parse_action(event.action)
                found.setdefault((action.stage, action.kind), []).append(after.start_s - event.start_s)
        walks += 1
    weights.discard_gradients()
    for name, buffer in buffers.items():
        weights.replace_buffer(name, buffer)
    watch.status = ""
    return {key: spans[-KEPT:] for key, spans in found.items()}


def with_times(cost: StageCost, stage: int, spans: Spans, step_s: float) -> StageCost:
    """The cost of a stage with mean times; an action that the program lacks takes none.

    step_s: seconds of the optimizer for this stage.
    """
    mean = {kind: statistics.fmean(took) for (s, kind), took in spans.items() if s == stage}
    ingoing, rest = mean.get(I, 0.0), mean.get(W, 0.0)
    return replace(
        cost, forward_s=mean.get(F, 0.0), backward_s=mean.get(B, ingoing + rest),
        input_grad_s=ingoing, weight_grad_s=rest, step_s=step_s,
        other_s={kind: span for kind, span in mean.items() if kind in OPERATIONS},
    )  # fmt: skip


def drawn(program: Program, spans: Spans, seed: int) -> dict[Action, float]:
    """A time for each action of the program, one of those that its kind took, at random.

    A step waits for the slower of two ranks again and again, so with means alone it would look shorter.
    """
    choose = random.Random(seed).choice
    return {
        action: choose(spans[action.stage, action.kind])
        for row in program.rows for action in row
        if isinstance(action, Action) and (action.stage, action.kind) in spans
    }  # fmt: skip
