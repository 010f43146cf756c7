"""Waits, marks, streams and lifetimes that are taken out of the runtime, one at a time.

Not here: marks of the recorder (only its figures change); the wait of `finish_send` (only bytes are counted
later); lifetimes of messages, whose memory the allocator gives back when their streams are done with it;
what a run needs that is given up (`discard`, `close`); and the order that `_Enqueued.done` makes: it
is missed only if a send is seen to end within a step.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import standin
import torch

from pipeloom import step_run
from pipeloom.runtime import batches, pinned_tier
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.device_transport import _Enqueued
from pipeloom.runtime.pinned_tier import PinnedCopy, PinnedTier
from pipeloom.runtime.rank import Rank
from pipeloom.runtime.recorder import DeviceClock
from pipeloom.runtime.reduce_and_step import ReduceAndStep
from pipeloom.runtime.weights import Gradients, Weights

Method = Callable[..., Any]


def within(context: Callable[[], Any]) -> Callable[[Method], Method]:
    """The same method in a context."""

    def change(method: Method) -> Method:
        def mutated(*args: Any, **how: Any) -> Any:
            with context():
                return method(*args, **how)

        return mutated

    return change


@contextmanager
def _marks_here() -> Iterator[None]:
    stream = torch.accelerator.current_stream()

    def mark() -> torch.Event:
        event = torch.Event(enable_timing=True)
        event.record(stream)
        return event

    with patch.object(DeviceClock, "mark", staticmethod(mark)):
        yield


without_waits = within(standin.deaf)
"""No stream waits."""
beside = within(torch.Stream)
"""On a stream that nothing waits for."""
marks_where_it_computes = within(_marks_here)
"""Its marks are on the stream of its caller."""


def skipped(where: Callable[..., bool]) -> Callable[[Method], Method]:
    return lambda method: lambda *given: None if where(*given) else method(*given)


def not_waited_for(what: str) -> Callable[[Method], Method]:
    """what: a part of what the watch says is waited for."""
    return skipped(lambda transfer, timeout_s: what in transfer.lookout.watch.waiting.what)


def sums_not_waited_for(group: str) -> Callable[[Method], Method]:
    return skipped(lambda channel, of, transfer: of is not None and of.name == group)


def frees_what_it_fills(method: Method) -> Method:
    def mutated(self: PinnedTier, copy: PinnedCopy) -> None:
        method(self, copy)
        copy.reloading = {slot: torch.empty_like(tensor) for slot, tensor in copy.reloading.items()}

    return mutated


def chunks_back_at_once(method: Method) -> Method:
    def mutated(self: PinnedTier, copy: PinnedCopy) -> None:
        method(self, copy)
        self._idle_chunks += copy.host
        copy.host = []

    return mutated


def one_set_of_gradients(method: Method) -> Method:
    def mutated(self: Weights) -> Gradients:
        self.summed = self.grads
        return self.grads

    return mutated


@dataclass(frozen=True)
class Mutation:
    """What replaces a name.

    says: a pattern of what the stand-in has to report; "": all is well.
    case: of `two_rank_plans`; "": one rank that offloads.
    """

    where: object
    name: str
    change: Callable[[Any], Any]
    says: str
    case: str = ""


ONE_RANK = {
    "the copy away does not wait for the computation": Mutation(
        PinnedTier, "offload", without_waits, "race: copy_ .* reads"),
    "the copy back does not wait for the computation": Mutation(
        PinnedTier, "copy_back", without_waits, "race: copy_ .* writes"),
    "the computation does not wait for the copy back": Mutation(
        PinnedCopy, "take", without_waits, "race: .* copy_ .* writes"),
    "what leaves is freed without a wait": Mutation(
        PinnedCopy, "leave", without_waits, "early free: .* while copy_"),
    "the copy away is marked where it is not": Mutation(
        PinnedTier, "offload", marks_where_it_computes, "early free: .* while copy_"),
    "the copy back is marked where it is not": Mutation(
        PinnedTier, "copy_back", marks_where_it_computes, "race: .* copy_ .* writes"),
    "what a copy back fills is freed": Mutation(
        PinnedTier, "copy_back", frees_what_it_fills, "early free: .* while copy_ .* write"),
    "the batch is copied beside the computation": Mutation(
        step_run, "_copy_to", beside, "race: .* copy_ .* writes"),
    "losses are read beside the computation": Mutation(
        batches, "read_scalars", beside, "race: .* reads"),
    "a forward runs beside the rest": Mutation(Rank, "_forward", beside, "race: "),
    "a backward runs beside the rest": Mutation(Rank, "_backward", beside, "race: "),
    "the update runs beside the rest": Mutation(ReduceAndStep, "step", beside, "race: "),
    "copies run where the computation runs": Mutation(
        pinned_tier, "_stream", lambda m: torch.accelerator.current_stream, ""),
}  # fmt: skip

TWO_RANKS = {
    "a message is not waited for": Mutation(
        _Enqueued, "wait", not_waited_for(" from rank"), "race: .* recv .* writes", "chain"),
    "a message is sent beside the computation": Mutation(
        Channel, "send", beside, "race: send .* reads", "chain"),
    "receives are posted beside the computation": Mutation(
        Channel, "_post_receives", beside, "race: recv .* writes", "chain"),
    "a recomputation runs beside the rest": Mutation(
        Rank, "_recompute", beside, "race: ", "chain, recompute ahead"),
    "host memory is given back under a copy": Mutation(
        PinnedTier, "copy_back", chunks_back_at_once, "race: copy_ .* writes .* copy_ .* reads",
        "towers, copies in the schedule"),
    "the sum of the norm is not waited for": Mutation(
        _Enqueued, "wait", not_waited_for("a sum over all ranks"), "race: .* all_reduce ", "towers"),
    "gradients of replicas are not waited for": Mutation(
        Channel, "_wait_for_sum", sums_not_waited_for("shared gradients"),
        "race: .* all_reduce ", "width 2"),
    "an owner's gradients are not waited for": Mutation(
        Channel, "_wait_for_sum", sums_not_waited_for("shared gradients"),
        "race: .* reduce ", "width 2, shares"),
    "updated parameters are not waited for": Mutation(
        Channel, "_wait_for_sum", sums_not_waited_for("updated parameters"),
        "race: .* broadcast ", "width 2, shares"),
    "sums begin beside the computation": Mutation(
        Channel, "begin_sum", beside, "race: all_reduce ", "width 2"),
    "parameters are sent beside the computation": Mutation(
        Channel, "begin_broadcast", beside, "race: broadcast ", "width 2, shares"),
    "the norm of a steady run is not waited for": Mutation(
        Channel, "_wait_for_sum", sums_not_waited_for("the gradients' norm"),
        "race: .* all_reduce ", "width 2, 2bw"),
    "gradients are added to while they are summed": Mutation(
        Weights, "begin_sums", one_set_of_gradients, "race: .* reduce ", "width 2, shares, 2bw"),
    "a version is begun beside the computation": Mutation(
        Weights, "_begin_version", beside, "race: ", "2bw"),
}  # fmt: skip


@contextmanager
def applied(name: str) -> Iterator[None]:
    if name == "none":
        yield
        return
    it = {**ONE_RANK, **TWO_RANKS}[name]
    never_sooner = patch.object(pinned_tier, "_reached", lambda event: False)  # seen to end, it needs no wait
    with never_sooner, patch.object(it.where, it.name, it.change(getattr(it.where, it.name))):
        yield


def require(name: str, reports: list[str]) -> None:
    expected = {**ONE_RANK, **TWO_RANKS}[name].says
    if expected:
        assert any(re.search(expected, report) for report in reports), reports
    else:
        assert not reports
