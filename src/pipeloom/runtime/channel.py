"""The channel proper: what to post, keep, wait for and free; the moving of bytes is a `Transport`'s.

Receives are posted ahead of need, since a transfer starts only once both ends are posted: with `ahead`
receives open per source, the next messages arrive while this rank computes. When one of them is through, the
buffer of the next is taken at once, but its receive is opened at the next call, after what this rank computes
in between: near the end of a transfer the transport is busy with the messages behind it, and who opens a
receive then waits for it, with gloo for up to 5 ms where all cores are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ir.errors import CommunicationError
from ..tracer import has_order, permute_to_memory
from .failure import Watch
from .messages import BufferPool, Message, as_bytes, check_tensors, pack, unpack

SMALL_BYTES = 1 << 16
"""Sends up to this size are looked at only at the end of the step: to see whether one is through takes longer
than it does."""


class PendingTransfer(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether the buffer is free again; never blocks, and may say False too long."""

    def wait(self, timeout_s: float) -> None:
        """Raises: TimeoutError when the time passes, ConnectionError if the transfer cannot succeed."""


class Transport(Protocol):
    """Moves flat byte buffers between ranks.

    index: counts the messages from one rank to another since the start; a receive gets the message of its
        index. None: outside that order; the k-th such receive gets the k-th such send.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def send(self, buffer: Tensor, target: int, index: int | None) -> PendingTransfer: ...

    def receive(self, buffer: Tensor, source: int, index: int | None) -> PendingTransfer: ...

    def all_reduce(self, tensor: Tensor) -> PendingTransfer:
        """Sum in place over all ranks."""

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        """Raises: as `PendingTransfer.wait`."""

    def interrupt(self) -> None:
        """Called from another thread: end all waits of this rank with ConnectionError, for good."""

    def close(self) -> None:
        """Called once, when the last wait is over."""


class CompletedTransfer:
    """The handle of a transfer of no bytes, or of one that is already through."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""


class FailedTransfer:
    """The handle of a transfer that could not even be posted."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> None:
        raise ConnectionError(self._reason)


@dataclass
class _Incoming:
    """The messages of one source.

    before: messages of earlier steps.  taken: how many of this step's have or had a buffer.
    posted: how many of these have, or had, a receive open.
    """

    before: int = 0
    messages: tuple[Message, ...] = ()
    taken: int = 0
    posted: int = 0
    received: int = 0
    place: dict[str, int] = field(default_factory=dict)


@dataclass
class _Sent:
    """A message under way. place: among all sends.  packed: its buffer is the pool's, not the caller's."""

    place: int
    message: Message
    handle: PendingTransfer
    buffer: Tensor
    packed: bool


class PostedChannel:
    """A `Channel` over any transport.

    device: where receive buffers live.  ahead: receives kept open per source.
    timeout_s: limit of each single wait.  on_change: called with `held_bytes` whenever it changes.
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
        self._incoming: dict[int, _Incoming] = {}
        self._taken: dict[str, Tensor] = {}
        self._open: dict[str, tuple[Tensor, PendingTransfer]] = {}
        self._in_use: dict[str, Tensor] = {}
        self._sent: list[_Sent] = []
        self._small_sent: list[_Sent] = []
        self._sends = 0
        self._sent_to: dict[int, int] = {}
        watch.on_failure(transport.interrupt)
        watch.on_exit(transport.close)

    @property
    def held_bytes(self) -> int:
        """Bytes of receive buffers (open, or received and not released) and of packed send buffers.

        One value that lies as it is to be sent is sent from the caller's own tensor: see `sending_bytes`.
        """
        self._sweep()
        return self._pool.held_bytes

    @property
    def sending_bytes(self) -> int:
        """Bytes of the caller's tensors that unfinished sends keep alive."""
        self._sweep()
        return self._sending_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of buffers kept for reuse."""
        return self._pool.idle_bytes

    def begin(self, incoming: Sequence[Message]) -> None:
        """Start a step: all messages this rank will get, per source in the order it sends them.

        Opens the first `ahead` receives of each source.
        """
        self._watch.check()
        self._sweep()
        self._pool.drop_unused()
        by_source: dict[int, list[Message]] = {}
        for message in incoming:
            by_source.setdefault(message.source, []).append(message)
        for source, messages in by_source.items():
            line = self._incoming.setdefault(source, _Incoming())
            line.messages = tuple(messages)
            line.place = {message.key: place for place, message in enumerate(messages)}
            self._take(line, self._ahead)
        self._post()

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send without waiting. The tensors must not be written to afterwards.

        Raises: CommunicationError if they are not what the message announces; nothing is sent then.
        """
        check_tensors(message, tensors)
        self._watch.check()
        self._sweep()
        self._post()
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
        handle = self._transport.send(buffer, message.target, index)
        sent = self._small_sent if message.bytes <= SMALL_BYTES else self._sent
        self._sends += 1
        sent.append(_Sent(self._sends, message, handle, buffer, packed))

    def receive(self, message: Message) -> list[Tensor]:
        """Wait for a message and return its values, which are valid until `release`.

        Raises: CommunicationError if it was not announced to `begin`, was received before, or does not
            come in time; PeerError if another rank failed.
        """
        line = self._incoming.get(message.source)
        place = None if line is None else line.place.pop(message.key, None)
        if line is None or place is None:
            raise CommunicationError(
                f"rank {self.rank} wants {message.key} from rank {message.source}, "
                "which was not announced for this step or was received before",
                hint="name every message of the step in begin(), and receive it once",
            )
        self._sweep()
        self._take(line, place + 1)
        self._post()
        buffer, handle = self._open[message.key]
        self._wait(f"{message.key} from rank {message.source}", message.source, handle)
        del self._open[message.key]
        self._in_use[message.key] = buffer
        line.received += 1
        self._take(line, line.received + self._ahead)
        if line.posted == line.received:
            self._post()
        return unpack(message, buffer)

    def opening_bytes(self, message: Message) -> int:
        """Bytes of the buffers that receiving this message opens for those behind it."""
        line = self._incoming.get(message.source)
        if line is None:
            return 0
        reached = max(line.place.get(message.key, -1), line.received + self._ahead) + 1
        return sum(later.bytes for later in line.messages[line.taken : reached])

    def finish_send(self) -> bool:
        """Wait until the oldest send under way is through, a small one too. Returns False if there is none.

        Raises: CommunicationError if it does not end in time; PeerError if another rank failed.
        """
        self._sweep()
        self._post()
        oldest = min((*self._sent[:1], *self._small_sent[:1]), key=lambda sent: sent.place, default=None)
        if oldest is None:
            return False
        self._wait_for(oldest)
        self._sweep()
        self._small_sent = self._still_going(self._small_sent)
        return True

    def release(self, message: Message) -> None:
        """The values of a received message are no longer used: its buffer may be reused."""
        self._pool.give(self._in_use.pop(message.key))

    def end(self) -> None:
        """End a step: wait until all own sends are through.

        Raises: CommunicationError if an announced message was never received or a send does not end in
            time; PeerError if another rank failed.
        """
        forgotten = [key for line in self._incoming.values() for key in line.place]
        if forgotten:
            raise CommunicationError(
                f"rank {self.rank} ends its step without having received {', '.join(forgotten)}",
                hint="receive every message that begin() names",
            )
        for sent in [*self._sent, *self._small_sent]:
            self._wait_for(sent)
        self._sweep()
        self._small_sent = self._still_going(self._small_sent)
        for line in self._incoming.values():
            line.before += len(line.messages)
            line.messages = ()
            line.taken = line.posted = line.received = 0

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int] | None = None) -> None:
        """Sum in place over `ranks` (all of them if None); each calls it, in the same order.

        A sum over some of the ranks is made by the lowest of them in rank order, so every rank gets the
        same bits, and no process group per set of ranks is needed.
        """
        members = tuple(sorted(ranks)) if ranks is not None else tuple(range(self.ranks))
        if len(members) == 1:
            return
        self._post()
        if len(members) == self.ranks:
            handle = self._transport.all_reduce(tensor)
            others = tuple(r for r in members if r != self.rank)
            self._watch.wait("a sum over all ranks", others, lambda: handle.wait(self._timeout_s))
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

    def all_gather_object(self, value: Any) -> list[Any]:
        """One small picklable object from every rank, in rank order."""
        self._post()
        found: list[Any] = []
        others = tuple(r for r in range(self.ranks) if r != self.rank)
        gather = self._transport.all_gather_object
        self._watch.wait(
            "control data from all ranks", others, lambda: found.extend(gather(value, self._timeout_s))
        )
        return found

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The small picklable object that rank `source` has."""
        return self.all_gather_object(value if self.rank == source else None)[source]

    def _take(self, line: _Incoming, count: int) -> None:
        """Take buffers until `count` of the line's messages have one; `_post` opens their receives."""
        while line.taken < min(count, len(line.messages)):
            message = line.messages[line.taken]
            self._taken[message.key] = self._pool.take(message.bytes)
            line.taken += 1

    def _post(self) -> None:
        """Open the receives of all buffers taken."""
        for line in self._incoming.values():
            while line.posted < line.taken:
                message = line.messages[line.posted]
                buffer = self._taken.pop(message.key)
                handle: PendingTransfer = CompletedTransfer()
                if message.bytes:
                    handle = self._transport.receive(buffer, message.source, line.before + line.posted)
                self._open[message.key] = (buffer, handle)
                line.posted += 1

    def _wait_for(self, sent: _Sent) -> None:
        target = sent.message.target
        self._wait(f"rank {target} to receive {sent.message.key}", target, sent.handle)

    def _wait(self, what: str, rank: int, handle: PendingTransfer) -> None:
        self._watch.wait(what, (rank,), lambda: handle.wait(self._timeout_s))

    def _send_now(self, tensor: Tensor, target: int) -> None:
        handle = self._transport.send(as_bytes(tensor), target, None)
        self._wait(f"rank {target} to receive its part of a sum", target, handle)

    def _receive_now(self, tensor: Tensor, source: int) -> None:
        handle = self._transport.receive(as_bytes(tensor), source, None)
        self._wait(f"a part of a sum from rank {source}", source, handle)

    def _sweep(self) -> None:
        """Free what finished sends held."""
        if self._sent:
            self._sent = self._still_going(self._sent)

    def _still_going(self, sends: list[_Sent]) -> list[_Sent]:
        """The sends that are not through; what the others held is freed."""
        going = []
        for sent in sends:
            if not sent.handle.done():
                going.append(sent)
            elif sent.packed:
                self._pool.give(sent.buffer)
            else:
                self._sending_bytes -= sent.message.bytes
        return going
