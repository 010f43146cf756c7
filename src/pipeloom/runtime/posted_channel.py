"""The channel: how a rank exchanges tensors with the other ranks of its pipeline.

`Channel` is what the worker sees. `PostedChannel` decides what to post, keep, wait for and free; a
`Transport` moves the bytes. Receives are posted ahead of need, since a transfer starts only once both ends
are posted: with `ahead` receives posted per source, the next messages arrive while this rank computes.

    buffers of one source      | in use | arrived or arriving | buffer taken |  no buffer yet
    messages                   m0       m1                    m3             m4 ...
                                        received              posted         with_buffer

When a message is received, the buffer of the next is taken at once, but its receive is posted at the next
call, after what this rank computes in between: near the end of a transfer the transport is busy with the
messages behind it, and who posts a receive then waits for it, with gloo for up to 5 ms on busy cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ir.errors import CommunicationError
from ..tracer.tensors import has_order, permute_to_memory
from .failure.watch import Watch
from .messages import BufferPool, Message, as_bytes, check_tensors, pack, unpack
from .posted import HostWait, MessageSource, PendingSum, PostedReceive, PostedSend
from .transports.transport import CompletedTransfer, PendingTransfer, SumGroup, Transport

SMALL_BYTES = 1 << 16
"""Sends up to this size are looked at only at the end of the step: to see whether one has ended takes longer
than it does."""


class Channel(Protocol):
    """How a rank exchanges tensors with the other ranks of its pipeline."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers, and of the caller's tensors that unfinished sends keep alive."""

    def begin(self, incoming: Sequence[Message]) -> None:
        """Start a step: all messages this rank will get, per source in the order it sends them."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send without waiting. The tensors must not be written to afterwards."""

    def receive(self, message: Message) -> list[Tensor]:
        """Wait for a message and return its values, which are valid until `release`."""

    def opening_bytes(self, message: Message) -> int:
        """Bytes of further buffers that receiving this message would take."""

    def finish_send(self) -> bool:
        """Wait until the oldest send under way has ended. Returns False if there is none."""

    def release(self, message: Message) -> None:
        """The values of a received message are no longer used: its buffer may be reused."""

    def end(self, *, wait_for_sends: bool = True) -> None:
        """End a step: wait until all sends of this rank have ended, unless another one follows at once."""

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int] | None = None) -> None:
        """Sum in place over `ranks` (all of them if None); each calls it, in the same order."""

    def begin_sum(self, tensor: Tensor, group: SumGroup, owner: int | None = None) -> PendingSum:
        """Begin a sum in place over the ranks of a group that `open_groups` has made; for `owner` only, if
        one is named."""

    def begin_broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingSum:
        """Begin to give all ranks of an open group what `source`, one of them, has in a tensor."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """One small picklable object from every rank, in rank order."""

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The small picklable object that rank `source` has."""


class PostedChannel:
    """A `Channel` over any transport.

    device: where receive buffers live.  ahead: receives kept posted per source.
    timeout_s: limit of each single wait.  on_change: called with `used_bytes` whenever it changes.
    A finished send is noticed at the next call of `begin`, `send`, `receive` or `end`, or when one asks what
    is held; a small one at `end` or `finish_send`.
    """

    def __init__(
        self,
        transport: Transport,
        watch: Watch,
        *,
        device: torch.device,
        ahead: int = 2,
        timeout_s: float = 300.0,
        on_change: Callable[[int], None] | None = None,
    ) -> None:
        self.rank = transport.rank
        self.ranks = transport.ranks
        self._sending_bytes = 0
        self._transport = transport
        self._watch = watch
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._pool = BufferPool(device, on_change)
        self._sources: dict[int, MessageSource] = {}
        # Receive buffers by the message's key: not posted yet, posted, and received but not released.
        self._unposted: dict[str, Tensor] = {}
        self._receives: dict[str, PostedReceive] = {}
        self._in_use: dict[str, Tensor] = {}
        self._sends: list[PostedSend] = []
        self._small_sends: list[PostedSend] = []
        self._send_count = 0
        self._sent_to: dict[int, int] = {}
        watch.on_failure(transport.interrupt)
        watch.on_exit(transport.close)

    @property
    def held_bytes(self) -> int:
        """`used_bytes` and `sending_bytes`."""
        if self._sends:
            self._free_finished_sends()
        return self._pool.used_bytes + self._sending_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of receive buffers (open, or received and not released) and of packed send buffers.

        One value that lies as it is to be sent is sent from the caller's own tensor: see `sending_bytes`.
        """
        self._free_finished_sends()
        return self._pool.used_bytes

    @property
    def sending_bytes(self) -> int:
        """Bytes of the caller's tensors that unfinished sends keep alive."""
        self._free_finished_sends()
        return self._sending_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of buffers kept for reuse."""
        return self._pool.idle_bytes

    def begin(self, incoming: Sequence[Message]) -> None:
        """Start a step: all messages this rank will get, per source in the order it sends them.

        Posts the first `ahead` receives of each source.
        """
        self._watch.check()
        self._free_finished_sends()
        self._pool.drop_unused()
        by_source: dict[int, list[Message]] = {}
        for message in incoming:
            by_source.setdefault(message.source, []).append(message)
        for rank, messages in by_source.items():
            source = self._sources.setdefault(rank, MessageSource())
            source.messages = tuple(messages)
            source.waiting_for = {message.key: index for index, message in enumerate(messages)}
            self._take_buffers(source, self._ahead)
        self._post_receives()

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Post a send. The tensors must not be written to afterwards.

        One tensor that lies in memory as the message has it is sent from there; others are packed first.
        Raises: CommunicationError if they are not what the message announces; nothing is sent then.
        """
        check_tensors(message, tensors)
        self._watch.check()
        self._free_finished_sends()
        self._post_receives()
        index = self._sent_to.get(message.target, 0)
        self._sent_to[message.target] = index + 1
        if not message.bytes:
            return  # the receiver knows the shapes: nothing needs to travel
        order = message.values[0].order
        packed = len(tensors) > 1 or not has_order(tensors[0], order)
        if packed:
            buffer = self._pool.take(message.bytes)
            pack(message, tensors, buffer)
        else:
            buffer = as_bytes(permute_to_memory(tensors[0], order))
            self._sending_bytes += message.bytes
        transfer = self._transport.send(buffer, message.target, index)
        sends = self._small_sends if message.bytes <= SMALL_BYTES else self._sends
        self._send_count += 1
        sends.append(PostedSend(self._send_count, message, transfer, buffer, packed))

    def receive(self, message: Message) -> list[Tensor]:
        """Wait for a message and return its values, which are valid until `release`.

        Raises: CommunicationError if it was not announced to `begin`, was received before, or does not
            come in time; PeerError if another rank failed.
        """
        source = self._sources.get(message.source)
        index = None if source is None else source.waiting_for.pop(message.key, None)
        if source is None or index is None:
            raise CommunicationError(
                f"rank {self.rank} wants {message.key} from rank {message.source}, "
                "which was not announced for this step or was received before",
                hint="name every message of the step in begin(), and receive it once",
            )
        self._free_finished_sends()
        self._take_buffers(source, index + 1)
        self._post_receives()
        buffer, transfer = self._receives[message.key]
        self._wait(f"{message.key} from rank {message.source}", message.source, transfer)
        del self._receives[message.key]
        self._in_use[message.key] = buffer
        source.received += 1
        self._take_buffers(source, source.received + self._ahead)
        if source.posted == source.received:
            self._post_receives()  # no receive is posted: none may wait for the next call
        return unpack(message, buffer)

    def opening_bytes(self, message: Message) -> int:
        """Bytes of the buffers that receiving this message opens for those behind it."""
        source = self._sources.get(message.source)
        if source is None:
            return 0
        end = max(source.waiting_for.get(message.key, -1), source.received + self._ahead) + 1
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
        self._wait_for(replace(oldest, transfer=HostWait(oldest.transfer)))
        self._free_finished_sends()
        self._small_sends = self._unfinished(self._small_sends)
        return True

    def release(self, message: Message) -> None:
        """The values of a received message are no longer used: its buffer may be reused."""
        self._pool.give(self._in_use.pop(message.key))

    def end(self, *, wait_for_sends: bool = True) -> None:
        """End a step: wait until all sends of this rank have ended, unless another one follows at once.

        Raises: CommunicationError if an announced message was never received or a send does not end in
            time; PeerError if another rank failed.
        """
        forgotten = [key for source in self._sources.values() for key in source.waiting_for]
        if forgotten:
            raise CommunicationError(
                f"rank {self.rank} ends its step without having received {', '.join(forgotten)}",
                hint="receive every message that begin() names",
            )
        for sent in [*self._sends, *self._small_sends] if wait_for_sends else []:
            self._wait_for(sent)
        self._free_finished_sends()
        self._small_sends = self._unfinished(self._small_sends)
        for source in self._sources.values():
            source.earlier += len(source.messages)
            source.messages = ()
            source.with_buffer = source.posted = source.received = 0

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int] | None = None) -> None:
        """Sum in place over `ranks` (all of them if None); each calls it, in the same order.

        A sum over some of the ranks is made by the lowest of them in rank order, so every rank gets the
        same bits, and no process group per set of ranks is needed.
        """
        members = tuple(sorted(ranks)) if ranks is not None else tuple(range(self.ranks))
        if len(members) == 1:
            return
        self._post_receives()
        if len(members) == self.ranks:
            transfer = self._transport.all_reduce(tensor)
            others = tuple(r for r in members if r != self.rank)
            self._watch.wait("a sum over all ranks", others, lambda: transfer.wait(self._timeout_s))
            return
        root, *rest = members
        mine = tensor.detach().contiguous()
        if self.rank == root:
            other = torch.empty_like(mine)
            for source in rest:
                self._receive_now(other, source)
                mine += other
            for target in rest:
                self._send_now(mine, target)
        else:
            self._send_now(mine, root)
            self._receive_now(mine, root)
        if mine.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(mine)

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        """Make groups of ranks for sums beside the steps. Every rank calls it with the same groups."""
        self._transport.open_groups(groups)

    def begin_sum(self, tensor: Tensor, group: SumGroup, owner: int | None = None) -> PendingSum:
        """Begin a sum in place over the ranks of an open group; all its ranks begin its sums in one order.

        tensor: contiguous; it must not be used before `PendingSum.wait`.
        owner: the only rank that gets the sum, for half of the bytes; the others' tensors are then lost.
        """
        self._post_receives()
        transfer: PendingTransfer = CompletedTransfer()
        if len(group.ranks) > 1 and owner is None:
            transfer = self._transport.all_reduce(tensor, group)
        elif len(group.ranks) > 1 and owner is not None:
            transfer = self._transport.reduce(tensor, group, owner)
        return PendingSum(group, transfer, self._wait_for_sum)

    def begin_broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingSum:
        """Begin to give all ranks of an open group what one of them has in a tensor.

        tensor: contiguous; it must not be used before `PendingSum.wait`.
        """
        self._post_receives()
        return PendingSum(group, self._transport.broadcast(tensor, group, source), self._wait_for_sum)

    def all_gather_object(self, value: Any) -> list[Any]:
        """One small picklable object from every rank, in rank order."""
        self._post_receives()
        values: list[Any] = []
        others = tuple(r for r in range(self.ranks) if r != self.rank)
        gather = self._transport.all_gather_object
        self._watch.wait(
            "control data from all ranks", others, lambda: values.extend(gather(value, self._timeout_s))
        )
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The small picklable object that rank `source` has."""
        return self.all_gather_object(value if self.rank == source else None)[source]

    def _take_buffers(self, source: MessageSource, count: int) -> None:
        """Take buffers until `count` of a source's messages have one; `_post_receives` posts them."""
        while source.with_buffer < min(count, len(source.messages)):
            message = source.messages[source.with_buffer]
            self._unposted[message.key] = self._pool.take(message.bytes)
            source.with_buffer += 1

    def _post_receives(self) -> None:
        """Post the receives of all buffers taken."""
        for source in self._sources.values():
            while source.posted < source.with_buffer:
                message = source.messages[source.posted]
                buffer = self._unposted.pop(message.key)
                transfer: PendingTransfer = CompletedTransfer()
                if message.bytes:
                    index = source.earlier + source.posted
                    transfer = self._transport.receive(buffer, message.source, index)
                self._receives[message.key] = PostedReceive(buffer, transfer)
                source.posted += 1

    def _wait_for_sum(self, group: SumGroup, transfer: PendingTransfer) -> None:
        self._post_receives()
        others = tuple(rank for rank in group.ranks if rank != self.rank)
        named = ", ".join(f"rank {rank}" for rank in others[:3]) + (", ..." if len(others) > 3 else "")
        what = f"a sum of {group.name} with {named}"
        self._watch.wait(what, others, lambda: transfer.wait(self._timeout_s))

    def _wait_for(self, sent: PostedSend) -> None:
        target = sent.message.target
        self._wait(f"rank {target} to receive {sent.message.key}", target, sent.transfer)

    def _wait(self, what: str, rank: int, transfer: PendingTransfer) -> None:
        self._watch.wait(what, (rank,), lambda: transfer.wait(self._timeout_s))

    def _send_now(self, tensor: Tensor, target: int) -> None:
        transfer = self._transport.send(as_bytes(tensor), target, None)
        self._wait(f"rank {target} to receive its part of a sum", target, transfer)

    def _receive_now(self, tensor: Tensor, source: int) -> None:
        transfer = self._transport.receive(as_bytes(tensor), source, None)
        self._wait(f"a part of a sum from rank {source}", source, transfer)

    def _free_finished_sends(self) -> None:
        """Free what finished sends held."""
        if self._sends:
            self._sends = self._unfinished(self._sends)

    def _unfinished(self, sends: list[PostedSend]) -> list[PostedSend]:
        """The sends that have not ended; what the others held is freed."""
        unfinished = []
        for sent in sends:
            if not sent.transfer.done():
                unfinished.append(sent)
            elif sent.packed:
                self._pool.give(sent.buffer)
            else:
                self._sending_bytes -= sent.message.bytes
        return unfinished
