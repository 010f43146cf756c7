"""How long this rank's actions take, from running its row of the program without the other ranks.

The worker itself runs it, so that micro-batches are in flight as in a step: a stage that alternates between
them finds less of its data in the caches than one that repeats one of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..ir.action import KINDS, STEP, Action, B, I, Kind, W, parse_action
from ..ir.costs import StageCost
from ..ir.graph import Value
from ..ir.schedule import Program
from ..tracer.tensors import view_in_order, zeros_like_value
from .channel import Channel
from .ledger import Ledger
from .messages import Message
from .rank import Microbatch, Rank, Variant
from .recorder import Clock, Recorder
from .tier import Tier
from .watch import Watch
from .weights import Weights

ActionTimes = dict[Action, float]
"""Seconds of each of a rank's compute actions and copies."""

COPIES = ("d2h", "h2d")
"""Streams that run beside the actions."""


class NullChannel(Channel):
    """A `Channel` that answers by itself: what it receives is made up, what it sends is dropped.

    examples: values by name, for those that may not be just any numbers, such as indices.
    """

    def __init__(self, rank: int, ranks: int, examples: Mapping[str, Tensor], device: torch.device) -> None:
        self.rank = rank
        self.ranks = ranks
        self._held_bytes, self._sends = 0, []
        self._examples = examples
        self._device = device
        # Of its own: what the user draws between two steps must not depend on rehearsals.
        self._generator = torch.Generator(device)

    def begin(self, incoming: Sequence[Message], receives: Sequence[Message] = ()) -> None:
        pass

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        pass

    def receive(self, message: Message) -> list[Tensor]:
        self._held_bytes += message.bytes
        return [self._make(value) for value in message.values]

    def opening_bytes(self, message: Message) -> int:
        return 0

    def finish_send(self) -> bool:
        return False

    def release(self, message: Message) -> None:
        self._held_bytes -= message.bytes

    def end(self, *, wait_for_sends: bool = True) -> None:
        pass

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int] | None = None) -> None:
        pass

    def all_gather_object(self, value: Any, what: str = "") -> list[Any]:
        return [value] * self.ranks

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
        self._rank = rank
        self._programs: dict[int | None, Program] = {None: program}
        self._weights = weights
        self._watch = watch
        self._recorder = Recorder(rank, clock)
        self.ledger = Ledger(rank, cap_bytes)
        self.ledger.set("batch", sum(t.nbytes for t in sample.values()))
        self.worker = Rank(
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
            # The examples of messages were recorded with seed 0: with another, what a model draws by Python's
            # generator could lead another way.
            Microbatch(variant=variant, inputs=sample, weight=1 / count, seed=0)
            for _ in range(count)
        ]

    def time_actions(self, microbatches: int | None = None) -> ActionTimes:
        """Do all actions of the row once; weights, buffers, optimizer and random numbers stay as they are.

        microbatches: do only those of the first so many of each stage; those of later ones are taken to take
            as long as these, in turn.
        An action takes until the rank goes on to the next one, so what the worker does between them counts.
        The sums of gradients are used, and empty again in the end, as they are between two steps.
        """
        assert not self._weights.grads.touched, "a rehearsal within a step would add to its gradients"
        buffers = dict(self._weights.buffers)
        for kind, size in self._weights.sizes.items():
            self.ledger.set(kind, size)
        self._recorder.next_step()
        try:
            if microbatches not in self._programs:
                assert microbatches is not None, "the whole program is there from the start"
                self._programs[microbatches] = shortened(self._programs[None], microbatches)
            number = self._weights.next_number
            numbered = [replace(part, number=number) for part in self._microbatches]
            self.worker.run(numbered, program=self._programs[microbatches], update=False)
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
        return times_s if microbatches is None else repeated(times_s, self._programs[None].rows[self._rank])


def shortened(program: Program, microbatches: int) -> Program:
    """A program without what its rows do for later micro-batches than the first so many of each stage."""
    numbers: dict[int, set[int]] = {}
    for row in program.rows:
        for step in row:
            if not step.is_stage_wide:
                numbers.setdefault(step.stage, set()).add(step.microbatch)
    first = {stage: set(sorted(all_of_it)[:microbatches]) for stage, all_of_it in numbers.items()}
    rows = tuple(
        tuple(step for step in row if step.is_stage_wide or step.microbatch in first[step.stage])
        for row in program.rows
    )
    return replace(program, rows=rows, pairs=())


def repeated(times_s: ActionTimes, row: Sequence[Action]) -> ActionTimes:
    """Times of all actions of a row from those of some of them: others of a stage and kind follow in turn.

    >>> row = [parse_action(text) for text in ("0F0", "0F1", "0F2")]
    >>> [f"{action} {span}" for action, span in repeated({row[0]: 1.0, row[1]: 2.0}, row).items()]
    ['0F0 1.0', '0F1 2.0', '0F2 1.0']
    """
    spans: dict[tuple[int, Kind], list[float]] = {}
    for action, span in times_s.items():
        spans.setdefault((action.stage, action.kind), []).append(span)
    turns = {key: cycle(known) for key, known in spans.items()}
    missing = (a for a in row if a not in times_s and (a.stage, a.kind) in turns)
    return times_s | {action: next(turns[action.stage, action.kind]) for action in missing}


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
