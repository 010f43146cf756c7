"""The channel: how a rank exchanges tensors with the other ranks of its pipeline.

A `Channel` decides what to post, keep, wait for and free; a `Transport` moves the bytes. Receives are posted
ahead of need, since a transfer starts only once both ends are posted: with a receive posted for the next
`AHEAD` that this rank receives from a source, and for all that are sent in front of them, they arrive while
this rank computes.

    buffers of one source      | in use | arrived or arriving | buffer taken |  no buffer yet
    messages                   m0       m1                    m3             m4 ...
                                        received              posted         with_buffer

When a message is received, the buffer of the next is taken at once, but its receive is posted at the next
call, after what this rank computes in between: near the end of a transfer the transport is busy with the
messages behind it, and who posts a receive then waits for it, with gloo for up to 5 ms on busy cores.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # documented names

from ..ir.errors import PeerError, PipeloomError
from .board import Board
from .device_transport import DeviceTransport, device_group
from .messages import Message, as_bytes, unpack
from .transport import (
    SMALL_BYTES,
    GlooTransport,
    PendingTransfer,
    SumGroup,
    Transport,
    ended_transfer,
    gloo_group,
    joined,
    parts_of,
)
from .watch import Watch

T = TypeVar("T")

AHEAD = 2
"""Messages of a source that this rank receives next and that have a receive posted."""

LOCAL_INTERVAL_S = 0.1
"""How often threads look whether another one has failed."""

POLL_S = 1e-4
"""How often `finish_send` looks, in seconds."""


@dataclass
class MessageSource:
    """The messages of one source in this step, and how far this rank is with them.

    values: of its messages that had a receive posted, since the start.
    waiting_for: key -> index, of those not received yet.
    received <= posted <= with_buffer: how many have come, have a receive posted, have a buffer, or had.
    upto: item i is how many there are up to the last sent of those i + 1 that this rank receives first.
    """

    values: int = 0
    messages: tuple[Message, ...] = ()
    with_buffer: int = 0
    posted: int = 0
    received: int = 0
    waiting_for: dict[str, int] = field(default_factory=dict)
    upto: list[int] = field(default_factory=list)

    def ahead(self, received: int) -> int:
        """How many have a receive posted once so many were received."""
        last = min(received + AHEAD, len(self.upto)) - 1
        return self.upto[last] if last >= 0 else 0


@dataclass
class PostedSend:
    """A message under way. number: among all sends.  buffers: kept alive until it has ended."""

    number: int
    message: Message
    transfer: PendingTransfer
    buffers: list[Tensor]


@dataclass(frozen=True)
class PendingSum:
    """A sum or a broadcast over the ranks of a group, or all. Nobody uses its tensor before `wait`."""

    group: SumGroup | None
    transfer: PendingTransfer
    _wait: Callable[[SumGroup | None, PendingTransfer], None]

    def done(self) -> bool:
        """Whether `wait` returns at once; never blocks."""
        return self.transfer.done()

    def wait(self) -> None:
        """Raises: CommunicationError if it does not end in time; PeerError if another rank failed."""
        self._wait(self.group, self.transfer)


class Channel:
    """How a rank exchanges tensors with the other ranks of its pipeline, over any transport.

    watch: entered by the caller before the first step.
    device: where receive buffers live.  timeout_s: limit of each single wait.
    A finished send is noticed at the next call of `begin`, `send`, `receive` or `end`, or when one asks what
    is held; a small one of a CPU at `end` or `finish_send`.
    """

    def __init__(
        self, transport: Transport, watch: Watch, *, device: torch.device, timeout_s: float = 300.0
    ) -> None:
        self.rank = transport.rank
        self.ranks = transport.ranks
        self._transport = transport
        self.watch = watch
        self._timeout_s = timeout_s
        self._device = device
        self._held_bytes = 0
        self._sources: dict[int, MessageSource] = {}
        # Receive buffers by the message's key: not posted yet, posted, and received but not released.
        self._unposted: dict[str, Tensor] = {}
        self._receives: dict[str, tuple[Tensor, PendingTransfer]] = {}
        self._in_use: dict[str, Tensor] = {}
        self._sends: list[PostedSend] = []
        self._small_sends: list[PostedSend] = []
        self._send_count = 0
        self._sent_to: dict[int, int] = {}
        watch.on_failure(transport.interrupt)
        watch.on_exit(transport.close)

    @property
    def held_bytes(self) -> int:
        """Bytes of receive buffers (open, or received and not released), of packed send buffers, and of the
        caller's tensors that unfinished sends keep alive."""
        if self._sends:
            self._free_finished_sends()
        return self._held_bytes

    def begin(self, incoming: Sequence[Message], receives: Sequence[Message] = ()) -> None:
        """Start a step: all messages this rank will get, per source in the order it sends them.

        receives: the same in the order in which this rank receives them, if that is another. Those of each
        source that come first have their receives posted, see `AHEAD`.
        """
        self.watch.check()
        self._free_finished_sends()
        by_source: dict[int, list[Message]] = {}
        for message in incoming:
            by_source.setdefault(message.source, []).append(message)
        for rank, messages in by_source.items():
            source = self._sources.setdefault(rank, MessageSource())
            source.messages = tuple(messages)
            source.waiting_for = {message.key: index for index, message in enumerate(messages)}
            source.upto = []
        for message in receives or incoming:
            source = self._sources[message.source]
            before = source.upto[-1] if source.upto else 0
            source.upto.append(max(before, source.waiting_for[message.key] + 1))
        for rank in by_source:
            self._take_buffers(self._sources[rank], self._sources[rank].ahead(0))
        self._post_receives()

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Post a send. The tensors must not be written to afterwards.

        Each is sent by itself, from where it lies, unless its dimensions lie there in another order: a copy
        of all in one piece would be there beside them.
        """
        assert message.fits(tensors), f"{message.key} carries other values"
        self.watch.check()
        self._free_finished_sends()
        self._post_receives()
        small = message.bytes <= SMALL_BYTES and self._device.type == "cpu"
        buffers, transfers = [], []
        for value, size, tensor in zip(message.values, message.sizes, tensors, strict=True):
            if not size:
                continue  # the receiver knows the shape: nothing needs to travel
            buffers.append(buffer := as_bytes(tensor, value.order))
            # The transport pairs a send with the receive of the same index: so both ends count all values
            # since the start, in the order of the sender.
            index = self._sent_to.get(message.target, 0)
            self._sent_to[message.target] = index + 1
            transfer = self._transport.send(buffer, message.target, index)
            transfers.append(transfer if small else self._transport.watched(transfer, message.target))
        if not transfers:
            return
        self._held_bytes += message.bytes
        self._send_count += 1
        sends = self._small_sends if small else self._sends
        sends.append(PostedSend(self._send_count, message, joined(transfers), buffers))

    def receive(self, message: Message) -> list[Tensor]:
        """Wait for a message and return its values, which are valid until `release`.

        message: announced to `begin`, and not received before.
        Raises: CommunicationError if it does not come in time; PeerError if another rank failed.
        """
        source = self._sources[message.source]
        index = source.waiting_for.pop(message.key)
        self._free_finished_sends()
        # A program may receive in another order than the source sends: all in front of it are posted then.
        self._take_buffers(source, index + 1)
        self._post_receives()
        buffer, transfer = self._receives[message.key]
        self._wait(f"{message.key} from rank {message.source}", message.source, transfer)
        del self._receives[message.key]
        self._in_use[message.key] = buffer
        source.received += 1
        self._take_buffers(source, source.ahead(source.received))
        if source.posted == source.received:
            self._post_receives()  # no receive is posted: none may wait for the next call
        return unpack(message, buffer)

    def opening_bytes(self, message: Message) -> int:
        """Bytes of the buffers that receiving this message opens for those behind it."""
        source = self._sources.get(message.source)
        if source is None:
            return 0
        end = max(source.waiting_for.get(message.key, -1) + 1, source.ahead(source.received + 1))
        return sum(later.bytes for later in source.messages[source.with_buffer : end])

    def finish_send(self) -> bool:
        """Wait until the oldest send under way has ended, a small one too. Returns False if there is none.

        Raises: CommunicationError if it does not end in time; PeerError if another rank failed.
        """
        self._free_finished_sends()
        self._post_receives()
        oldest = min((*self._sends[:1], *self._small_sends[:1]), key=lambda sent: sent.number, default=None)
        if oldest is None:
            return False
        target, transfer = oldest.message.target, oldest.transfer

        def wait() -> None:
            """Between accelerators it is the stream that waits. But it is the host that takes memory, and
            PyTorch gives back what another stream uses only once that is done with it."""
            end_s = time.monotonic() + self._timeout_s
            transfer.wait(self._timeout_s)
            while not transfer.done():
                if time.monotonic() > end_s:
                    raise TimeoutError
                time.sleep(POLL_S)

        self.watch.wait(f"rank {target} to receive {oldest.message.key}", (target,), wait)
        self._free_finished_sends()
        self._small_sends = self._unfinished(self._small_sends)
        return True

    def release(self, message: Message) -> None:
        """The values of a received message are no longer used: its buffer is free."""
        del self._in_use[message.key]
        self._held_bytes -= message.bytes

    def end(self, *, wait_for_sends: bool = True) -> None:
        """End a step: wait until all sends of this rank have ended, unless another one follows at once.

        Raises: CommunicationError if a send does not end in time; PeerError if another rank failed.
        """
        forgotten = [key for source in self._sources.values() for key in source.waiting_for]
        assert not forgotten, f"rank {self.rank} ends its step without having received {forgotten}"
        for sent in [*self._sends, *self._small_sends] if wait_for_sends else []:
            target = sent.message.target
            self._wait(f"rank {target} to receive {sent.message.key}", target, sent.transfer)
        self._free_finished_sends()
        self._small_sends = self._unfinished(self._small_sends)
        # Without a flush steps follow each other, and no wait tells of the end of small ones.
        for sent in self._small_sends:
            target = sent.message.target
            sent.transfer = joined([self._transport.watched(t, target) for t in parts_of(sent.transfer)])
        self._sends = sorted([*self._sends, *self._small_sends], key=lambda sent: sent.number)
        self._small_sends = []
        for source in self._sources.values():
            source.messages = ()
            source.with_buffer = source.posted = source.received = 0

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int] | None = None) -> None:
        """Sum in place over `ranks` (all of them if None); each calls it, in the same order, and gets the
        same bits.

        ranks: fewer than all of them need a group: `open_groups` with `meeting(ranks)`.
        """
        members = range(self.ranks) if ranks is None else ranks
        if len(members) == 1:
            return
        dense = tensor.detach().contiguous()
        self.begin_sum(dense, meeting(members) if len(members) < self.ranks else None).wait()
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        """Make groups of ranks for sums beside the steps. Every rank calls it with the same groups."""
        self._transport.open_groups(groups)

    def begin_sum(self, tensor: Tensor, group: SumGroup | None, owner: int | None = None) -> PendingSum:
        """Begin a sum in place over the ranks of an open group, or all; these begin its sums in one order.

        tensor: contiguous; it must not be used before `PendingSum.wait`.
        owner: the only rank that gets the sum, for half of the bytes; the others' tensors are then lost.
        """
        self._post_receives()
        transfer: PendingTransfer = ended_transfer()
        if owner is None and self.ranks > 1 and (group is None or len(group.ranks) > 1):
            transfer = self._transport.all_reduce(tensor, group)
        elif owner is not None and group is not None and len(group.ranks) > 1:
            transfer = self._transport.reduce(tensor, group, owner)
        return PendingSum(group, transfer, self._wait_for_sum)

    def begin_broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingSum:
        """Begin to give all ranks of an open group what one of them has in a tensor.

        tensor: contiguous; it must not be used before `PendingSum.wait`.
        """
        self._post_receives()
        transfer: PendingTransfer = ended_transfer()
        if len(group.ranks) > 1:
            transfer = self._transport.broadcast(tensor, group, source)
        return PendingSum(group, transfer, self._wait_for_sum)

    def all_gather_object(self, value: Any, what: str = "control data from all ranks") -> list[Any]:
        """One small picklable object from every rank, in rank order."""
        if self.ranks == 1:
            return [value]
        self._post_receives()
        values: list[Any] = []
        others = tuple(r for r in range(self.ranks) if r != self.rank)
        gather = self._transport.all_gather_object
        self.watch.wait(what, others, lambda: values.extend(gather(value, self._timeout_s)))
        return values

    def broadcast_object(self, value: Any) -> Any:
        """The small picklable object that rank 0 has."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def agree(
        self, refusal: PipeloomError | None, value: T, what: str = "control data from all ranks"
    ) -> list[T]:
        """What every rank brings, in rank order, unless one refuses: so none goes on without another. As all
        must reach it, a rank that has failed brings its error here instead of raising it.

        Raises: on all ranks if any refuses: its own refusal, or else that of the lowest such rank.
        """
        everyone: list[tuple[PipeloomError | None, T]] = self.all_gather_object((refusal, value), what)
        if refusal is not None:
            raise refusal
        for rank, (theirs, _) in enumerate(everyone):
            if theirs is not None:
                raise type(theirs)(f"{theirs.message} (rank {rank})", hint=theirs.hint)
        return [brought for _, brought in everyone]

    def _take_buffers(self, source: MessageSource, count: int) -> None:
        """Take buffers until `count` of a source's messages have one; `_post_receives` posts them."""
        while source.with_buffer < min(count, len(source.messages)):
            message = source.messages[source.with_buffer]
            self._unposted[message.key] = self._buffer(message)
            source.with_buffer += 1

    def _buffer(self, message: Message) -> Tensor:
        """Its contents are undefined. On the CPU, too, the allocator keeps what is freed (`allocator.py`)."""
        self._held_bytes += message.bytes
        return torch.empty(message.bytes, dtype=torch.uint8, device=self._device)

    def _post_receives(self) -> None:
        """Post the receives of all buffers taken."""
        for source in self._sources.values():
            while source.posted < source.with_buffer:
                message = source.messages[source.posted]
                buffer = self._unposted.pop(message.key)
                transfers = []
                for size, start in zip(message.sizes, message.offsets, strict=True):
                    if size:
                        part = buffer[start : start + size]
                        transfers.append(self._transport.receive(part, message.source, source.values))
                        source.values += 1
                self._receives[message.key] = buffer, joined(transfers)
                source.posted += 1

    def _wait_for_sum(self, group: SumGroup | None, transfer: PendingTransfer) -> None:
        self._post_receives()
        others = tuple(r for r in (range(self.ranks) if group is None else group.ranks) if r != self.rank)
        named = ", ".join(f"rank {rank}" for rank in others[:3]) + (", ..." if len(others) > 3 else "")
        what = "a sum over all ranks" if group is None else f"a sum of {group.name} with {named}"
        self.watch.wait(what, others, lambda: transfer.wait(self._timeout_s))

    def _wait(self, what: str, rank: int, transfer: PendingTransfer) -> None:
        self.watch.wait(what, (rank,), lambda: transfer.wait(self._timeout_s))

    def _free_finished_sends(self) -> None:
        if self._sends:
            self._sends = self._unfinished(self._sends)

    def _unfinished(self, sends: list[PostedSend]) -> list[PostedSend]:
        """The sends that have not ended; what the others held is freed."""
        unfinished = []
        for sent in sends:
            if not sent.transfer.done():
                unfinished.append(sent)
            else:
                self._held_bytes -= sent.message.bytes
        return unfinished


def meeting(ranks: Sequence[int]) -> SumGroup:
    """The group of some ranks that sum for an operation of the schedule."""
    return SumGroup("an operation", tuple(sorted(ranks)))


def dist_channel(
    group: dist.ProcessGroup,
    watch: Watch,
    *,
    device: torch.device,
    timeout_s: float = 300.0,
    pairs: Iterable[tuple[int, int]] | None = None,
) -> Channel:
    """One process's channel: gloo between CPUs, the device's backend between others. All ranks of the group
    make it.

    group: the ranks of this pipeline; a channel rank is a rank of this group. Messages go over it as it is on
        the CPU, and over groups of their own on a GPU.
    pairs: (source, target) of all messages, if known; on a GPU only these get connections.
    """
    group_store, rank = group.get_group_store(), group.rank()
    number = group_store.add(f"pipeloom/channels/{rank}", 1)
    store = PrefixStore(f"pipeloom/channel {number}", group_store)
    make = partial(gloo_group, store, timedelta(seconds=timeout_s))
    transport: Transport
    if device.type == "cpu":
        transport = GlooTransport(group, make)
    else:
        transport = DeviceTransport(
            group,
            watch,
            make=partial(device_group, store, timeout_s, device),
            make_control=make,
            device=device,
            timeout_s=timeout_s,
            pairs=pairs,
        )
    return Channel(transport, watch, device=device, timeout_s=timeout_s)


def local_channels(ranks: int, *, timeout_s: float = 300.0) -> list[Channel]:
    """Channels of ranks 0 to `ranks` - 1 as threads of this process, each to be entered (`channel.watch`) and
    used by its thread.
    """
    _allow_files(4 * ranks * (ranks - 1))  # sockets of a few groups; each has one for both ends of every pair
    store = HashStore()
    make = partial(gloo_group, store, timedelta(seconds=timeout_s), inside=True)

    def channel(rank: int) -> Channel:
        group = make("messages", rank, ranks) if ranks > 1 else None
        watch = Watch(Board(store, rank, ranks, interval_s=LOCAL_INTERVAL_S, lost_s=math.inf))
        cpu = torch.device("cpu")
        transport = GlooTransport(group, make)
        return Channel(transport, watch, device=cpu, timeout_s=timeout_s)

    with ThreadPoolExecutor(ranks) as pool:  # a group is there once all its ranks have come
        return list(pool.map(channel, range(ranks)))


def _allow_files(count: int) -> None:
    """Let this process have so many more files open than the 1024 that are usual, as far as it may."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run_threads(
    ranks: int | Sequence[Channel], work: Callable[[int, Channel], T], *, timeout_s: float = 300.0
) -> list[T]:
    """What `work(rank, channel)` returns for each rank, run in a thread per rank.

    ranks: how many, or their channels.
    Raises: the first rank's own error, rather than what other ranks raise because that one has failed.
    """
    channels = local_channels(ranks, timeout_s=timeout_s) if isinstance(ranks, int) else ranks
    with ThreadPoolExecutor(len(channels)) as pool:
        calls = [pool.submit(work, channel.rank, channel) for channel in channels]
    errors = [error for call in calls if (error := call.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return [call.result() for call in calls]
