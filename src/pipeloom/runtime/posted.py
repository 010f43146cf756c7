"""What a channel has posted and not finished yet: receives of one source, sends, and sums over ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .messages import Message
from .transports.transport import PendingTransfer, SumGroup

POLL_S = 1e-4
"""How often `HostWait` looks, in seconds."""


@dataclass
class MessageSource:
    """The messages of one source in this step, and how far this rank is with them.

    earlier: how many there were in earlier steps.  waiting_for: key -> index, of those not received yet.
    received <= posted <= with_buffer: how many have come, have a receive posted, have a buffer, or had.
    """

    earlier: int = 0
    messages: tuple[Message, ...] = ()
    with_buffer: int = 0
    posted: int = 0
    received: int = 0
    waiting_for: dict[str, int] = field(default_factory=dict)


class PostedReceive(NamedTuple):
    buffer: Tensor
    transfer: PendingTransfer


@dataclass
class PostedSend:
    """A message under way. number: among all sends.  packed: its buffer is the pool's, not the caller's."""

    number: int
    message: Message
    transfer: PendingTransfer
    buffer: Tensor
    packed: bool


class HostWait:
    """A transfer whose `wait` holds up the host, too, until what it sends is free for others.

    With NCCL it is the stream that waits. But it is the host that takes memory, and PyTorch gives back what
    another stream uses only once that is done with it.
    """

    def __init__(self, transfer: PendingTransfer) -> None:
        self._transfer = transfer

    def done(self) -> bool:
        return self._transfer.done()

    def wait(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        self._transfer.wait(timeout_s)
        while not self.done():
            if time.monotonic() > end_s:
                raise TimeoutError
            time.sleep(POLL_S)


@dataclass(frozen=True)
class PendingSum:
    """A sum or a broadcast over the ranks of a group, under way. Nobody uses its tensor before `wait`."""

    group: SumGroup
    transfer: PendingTransfer
    _wait: Callable[[SumGroup, PendingTransfer], None]

    def done(self) -> bool:
        """Whether `wait` returns at once; never blocks."""
        return self.transfer.done()

    def wait(self) -> None:
        """Raises: CommunicationError if it does not end in time; PeerError if another rank failed."""
        self._wait(self.group, self.transfer)
