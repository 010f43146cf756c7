"""What a channel asks of a network: to move flat byte buffers between ranks, without blocking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class PendingTransfer(Protocol):
    """A transfer under way."""

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


def in_rounds(groups: Sequence[SumGroup], rank: int) -> list[SumGroup]:
    """What a rank opens so that all ranks open equally many groups: in each round one that it is in, or one
    of its own. torch names a group after its ranks and the number of groups that a process has already, so
    ranks of one group would wait for each other for ever if they had opened unequally many before.

    groups: the same on all ranks.

    >>> pair, other, all_four = SumGroup("a", (0, 1)), SumGroup("a", (2, 3)), SumGroup("a", (0, 1, 2))
    >>> [group.ranks for group in in_rounds([pair, all_four, other], 3)]
    [(2, 3), (3,)]
    """
    rounds: list[list[SumGroup]] = []
    for group in groups:
        free = (opened for opened in rounds if not any(set(group.ranks) & set(o.ranks) for o in opened))
        into = next(free, None)
        if into is None:
            rounds.append(into := [])
        into.append(group)
    alone = SumGroup("nobody else", (rank,))
    return [next((group for group in opened if rank in group.ranks), alone) for opened in rounds]


class Transport(Protocol):
    """Moves flat byte buffers between ranks.

    buffer: uint8, one dimension.
    index: counts the messages from one rank to another since the start; a receive gets the message of its
        index. None: outside that order; the k-th such receive gets the k-th such send.

    `send` and `receive` post a transfer and return at once, even if they cannot: what went wrong is raised by
    `wait`. A rank that blocked here while its peer does the same would never post what the peer waits for.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def send(self, buffer: Tensor, target: int, index: int | None) -> PendingTransfer: ...

    def receive(self, buffer: Tensor, source: int, index: int | None) -> PendingTransfer: ...

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        """Make groups for sums. All ranks call it with the same groups, also those that are in none."""

    def all_reduce(self, tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
        """Begin a sum in place over the ranks of an open group, or over all; each gets the same bits.

        tensor: on the ranks' device; or on the host, for control data of all ranks, without a device's part.
        """

    def reduce(self, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        """Begin a sum in place for one rank of an open group; those of the others may hold anything then."""

    def broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingTransfer:
        """Begin to copy the tensor of `source`, a rank of an open group, into those of its other ranks."""

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        """Raises: as `PendingTransfer.wait`."""

    def interrupt(self) -> None:
        """Called from another thread: end all waits of this rank with ConnectionError, for good."""

    def close(self) -> None:
        """Called once, when the last wait is over."""


class CompletedTransfer:
    """A transfer of no bytes, or one that has ended already."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""


class FailedTransfer:
    """A transfer that could not even be posted."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> None:
        raise ConnectionError(self._reason)
