"""Moving bytes between ranks without blocking: what a channel asks for, and how gloo does it.

gloo moves tensors between CPUs, and control data everywhere. What it does, and what follows from it (seen
with torch 2.11 and 2.13):

- A send ends only when its receive is posted, and `is_completed()` of a point-to-point operation
  stays False until someone waits. So that large buffers are freed early, one thread per target waits for
  the sends to it. Small ones are waited for at the end of the step: a thread's wake-up takes longer than
  they do.
- An operation can be waited for once only; a second wait would not return.
- A wait whose time limit passes closes all connections of the group. A wait can therefore not be made in
  slices; but a short wait for a message that nobody sends ends all other waits of this process, and gloo's
  `abort()` does not.
- Its own thread lets go of a collective a moment after the wait for it ends. Were it the last one to do so,
  it would free Python objects, and that crashes while the interpreter shuts down. A group that goes waits for
  its threads.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented names

from .one_thread import OneThread

SMALL_BYTES = 1 << 16
"""Sends of a CPU up to this size are looked at only at the end of the step: to see whether one has ended
takes longer than it does."""

MESSAGE_TAGS = 1 << 20
FIRST_TAG = 1 << 30
"""Tags from here on are ours, so a user's own messages on the same group do not mix with the pipeline's."""
INTERRUPT_TAG = FIRST_TAG + MESSAGE_TAGS

CLOSING_S = 2.0
"""How long a transport that closes waits for the threads that wait for its sends."""

NO_LIMIT = timedelta(days=30)
"""For waits that another wait's time limit covers."""

Group: TypeAlias = Any
"""A process group of torch.distributed, or one of its backends alone: both have the same verbs."""

MakeGroup: TypeAlias = Callable[[str, int, int], Group]
"""Makes a group of that name for a rank of so many; returns once all of them have come."""


class PendingTransfer(Protocol):
    def done(self) -> bool:
        """Whether the buffer is free again; never blocks, and may say False too long."""

    def wait(self, timeout_s: float) -> None:
        """Raises: TimeoutError when the time passes, ConnectionError if the transfer cannot succeed."""


class SumGroup(NamedTuple):
    """Ranks that sum tensors, in an order of their own: sums of two groups may begin in another order on some
    ranks.

    name: several groups may have the same ranks.  ranks: ascending.
    """

    name: str
    ranks: tuple[int, ...]


class Transport(ABC):
    """Moves flat byte buffers between ranks.

    group: of the ranks; None for a rank alone.  make: makes those that it sums in beside it.
    buffer: uint8, one dimension.
    index: counts the messages from one rank to another since the start; a receive gets the message of its
        index.

    `send` and `receive` post a transfer and return at once, even if they cannot: what went wrong is raised by
    `wait`. A rank that blocked here while its peer does the same would never post what the peer waits for.
    """

    def __init__(self, group: Group | None, make: MakeGroup) -> None:
        self.rank: int = 0 if group is None else group.rank()
        self.ranks: int = 1 if group is None else group.size()
        self._group: Group = group
        self._make = make
        self._open: dict[SumGroup, Group] = {}

    @abstractmethod
    def send(self, buffer: Tensor, target: int, index: int) -> PendingTransfer: ...

    @abstractmethod
    def receive(self, buffer: Tensor, source: int, index: int) -> PendingTransfer: ...

    def watched(self, send: PendingTransfer, target: int) -> PendingTransfer:
        """The same send, that says when it has ended though nobody waits for it."""
        return send

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        """Make groups for sums, each without other ranks. All ranks call it with the same groups, also those
        that are in none, and come to a group after those before it, so none waits for ever."""
        for group in groups:
            ranks = group.ranks
            if self.rank in ranks and len(ranks) > 1 and group not in self._open:
                self._open[group] = self._make(f"{group.name} {ranks}", ranks.index(self.rank), len(ranks))

    def all_reduce(self, tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
        """Begin a sum in place over the ranks of an open group, or over all; each gets the same bits.

        tensor: on the ranks' device; or on the host, for control data of all ranks, without a device's part.
        """
        over = self._group if group is None else self._open[group]
        return self._begun(over.allreduce([tensor]))

    @abstractmethod
    def reduce(self, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        """Begin a sum in place for one rank of an open group; those of the others may hold anything then."""

    def broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingTransfer:
        """Begin to copy the tensor of `source`, a rank of an open group, into those of its other ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = group.ranks.index(source)
        return self._begun(self._open[group].broadcast([tensor], options))

    @abstractmethod
    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        """Raises: as `PendingTransfer.wait`."""

    @abstractmethod
    def interrupt(self) -> None:
        """Called from another thread: end all waits of this rank with ConnectionError, for good."""

    @abstractmethod
    def close(self) -> None:
        """Called once, when the last wait is over."""

    @abstractmethod
    def _begun(self, work: dist.Work) -> PendingTransfer: ...


def gloo_group(
    store: Store, timeout: timedelta, name: str, rank: int, ranks: int, *, inside: bool = False
) -> dist.ProcessGroupGloo:
    """A group of gloo's, apart from all others on the store; returns once all its ranks have come.

    inside: whether all ranks are in this process, and nothing needs to be reachable from outside.
    """
    own = PrefixStore(name, store)
    if inside:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        # Not lazy_init: then to post a message waits for the other end to have come that far.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(own, rank, ranks, options)
    else:
        group = dist.ProcessGroupGloo(own, rank, ranks, timeout)
    # A rank that closes its end at once would fail one that still connects.
    group.barrier().wait(timeout)  # type: ignore[attr-defined]
    return group


class GlooTransport(Transport):
    """Point-to-point by tag on the given group, and sums beside it on groups that it opens."""

    def __init__(self, group: Group | None, make: MakeGroup) -> None:
        super().__init__(group, make)
        self._sending: dict[int, OneThread] = {}
        # gloo's thread is not to be the last to let go of it.
        self._last_collective: dist.Work | None = None

    def send(self, buffer: Tensor, target: int, index: int) -> PendingTransfer:
        try:
            work = self._group.send([buffer], target, _tag(index))
        except RuntimeError as error:
            return ended_transfer(error)
        return GlooTransfer(work) if buffer.numel() <= SMALL_BYTES else self._waited_for(work, target)

    def watched(self, send: PendingTransfer, target: int) -> PendingTransfer:
        return self._waited_for(send.work, target) if isinstance(send, GlooTransfer) else send

    def _waited_for(self, work: dist.Work, target: int) -> PendingTransfer:
        if target not in self._sending:
            self._sending[target] = OneThread(f"pipeloom-send-{self.rank}-{target}")
        return FutureTransfer(self._sending[target].submit(partial(work.wait, NO_LIMIT)))

    def receive(self, buffer: Tensor, source: int, index: int) -> PendingTransfer:
        try:
            return GlooTransfer(self._group.recv([buffer], source, _tag(index)))
        except RuntimeError as error:
            return ended_transfer(error)

    def reduce(self, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        """The owner gathers all and adds, in rank order: gloo's own reduce sends up to twice the bytes. It
        takes room for as many tensors as there are ranks."""
        parts = [torch.empty_like(tensor) for _ in group.ranks] if self.rank == owner else []
        options = dist.GatherOptions()
        options.rootRank = group.ranks.index(owner)
        work = self._open[group].gather([parts] if parts else [], [tensor], options)

        def add() -> None:
            for index, part in enumerate(parts):
                tensor.add_(part) if index else tensor.copy_(part)
            parts.clear()

        return self._begun(work, add)

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([mine.numel()]), timeout_s)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        texts = self._all_gather(padded, timeout_s)
        return [
            pickle.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)
        ]

    def interrupt(self) -> None:
        for group in [group for group in (self._group, *self._open.values()) if group is not None]:
            for peer in range(group.size()):
                if peer == group.rank():
                    continue
                with suppress(RuntimeError):  # which is the purpose; or this peer's connection has ended
                    nobody_sends_this = torch.empty(1, dtype=torch.uint8)
                    group.recv([nobody_sends_this], peer, INTERRUPT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        for thread in self._sending.values():
            thread.close(CLOSING_S)
        self._last_collective = None
        self._open.clear()
        self._group = None

    def _begun(self, work: dist.Work, then: Callable[[], None] = lambda: None) -> PendingTransfer:
        self._last_collective = work
        return GlooTransfer(work, then)

    def _all_gather(self, tensor: Tensor, timeout_s: float) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
        self._begun(self._group.allgather([gathered], [tensor])).wait(timeout_s)
        return gathered


class GlooTransfer:
    """An operation that the calling thread waits for.  then: what is left to do once it has ended."""

    def __init__(self, work: dist.Work, then: Callable[[], None] = lambda: None) -> None:
        self.work = work
        self._then = then
        self._done = False

    def done(self) -> bool:
        return self._done or self.work.is_completed()

    def wait(self, timeout_s: float) -> None:
        start = time.monotonic()
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - start >= 0.99 * timeout_s:
                raise TimeoutError from None
            raise ConnectionError(first_line(error)) from None
        self._done = True
        self._then()


class FutureTransfer:
    """A transfer that ends as a future does: with a RuntimeError where it could not succeed."""

    def __init__(self, ended: Future[Any]) -> None:
        self._ended = ended

    def done(self) -> bool:
        return self._ended.done() and self._ended.exception() is None

    def wait(self, timeout_s: float) -> None:
        try:
            self._ended.result(timeout_s)
        except RuntimeError as error:
            raise ConnectionError(first_line(error)) from None


def ended_transfer(error: RuntimeError | None = None) -> FutureTransfer:
    """One that has ended already, as one of no bytes; or that could not even be posted."""
    ended: Future[None] = Future()
    ended.set_result(None) if error is None else ended.set_exception(error)
    return FutureTransfer(ended)


@dataclass(frozen=True)
class _Joined:
    """Several transfers that are waited for as one."""

    parts: tuple[PendingTransfer, ...]

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def wait(self, timeout_s: float) -> None:
        for part in self.parts:
            part.wait(timeout_s)


def joined(parts: Sequence[PendingTransfer]) -> PendingTransfer:
    """One transfer that ends when all of them have."""
    return parts[0] if len(parts) == 1 else _Joined(tuple(parts)) if parts else ended_transfer()


def parts_of(transfer: PendingTransfer) -> Sequence[PendingTransfer]:
    """What `joined` made one of."""
    return transfer.parts if isinstance(transfer, _Joined) else (transfer,)


def _tag(index: int) -> int:
    return FIRST_TAG + index % MESSAGE_TAGS


def first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
