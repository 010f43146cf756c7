"""The ranks of a pipeline as threads of one process: whole-pipeline tests without a network.

Sends and receives meet as on a network: a transfer happens once both ends are posted, and it copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ...ir.errors import PeerError
from ..failure.noticeboard import LocalBoard, local_boards
from ..failure.watch import Watch
from ..posted_channel import PostedChannel
from .transport import PendingTransfer, SumGroup

T = TypeVar("T")


class LocalChannel(PostedChannel):
    """One thread's channel. watch: that thread's watch, to be entered by it."""

    def __init__(
        self,
        transport: LocalTransport,
        *,
        ahead: int = 2,
        timeout_s: float = 300.0,
        on_change: Callable[[int], None] | None = None,
    ) -> None:
        self.watch = Watch(transport.board)
        super().__init__(
            transport,
            self.watch,
            device=torch.device("cpu"),
            ahead=ahead,
            timeout_s=timeout_s,
            on_change=on_change,
        )


def local_channels(
    ranks: int,
    *,
    ahead: int = 2,
    timeout_s: float = 300.0,
    on_change: Callable[[int, int], None] | None = None,
) -> list[LocalChannel]:
    """Channels of ranks 0 to `ranks` - 1, for one thread each.

    on_change: called with the rank and its `used_bytes` whenever they change.
    """
    rendezvous = _Rendezvous()

    def listener(rank: int) -> Callable[[int], None] | None:
        return None if on_change is None else lambda used: on_change(rank, used)

    return [
        LocalChannel(
            LocalTransport(board, rendezvous),
            ahead=ahead,
            timeout_s=timeout_s,
            on_change=listener(board.rank),
        )
        for board in local_boards(ranks)
    ]


def run_threads(
    ranks: int | Sequence[LocalChannel], work: Callable[[int, LocalChannel], T], *, timeout_s: float = 300.0
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


_TransferKey: TypeAlias = tuple[int, int, str, int]
"""Source, target, kind of order, and number within it."""

_SumKey: TypeAlias = tuple[SumGroup, int]
"""The ranks that meet, and which of their sums it is."""


@dataclass
class _Rendezvous:
    """Where the two ends of a transfer, and the contributions to a sum, find each other."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    broken: bool = False
    transfers: dict[_TransferKey, _LocalTransfer] = field(default_factory=dict)
    collectives: dict[_SumKey, _Collective] = field(default_factory=dict)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.broken or ready(), timeout_s)
            if ready():
                return
            raise ConnectionError("a rank failed") if self.broken else TimeoutError


class _LocalTransfer:
    """Both ends' handle."""

    def __init__(self, rendezvous: _Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._done = False
        self.source: Tensor | None = None
        self.target: Tensor | None = None

    def copy_if_both_are_there(self) -> bool:
        """Copy if both ends are there."""
        if self.source is None or self.target is None:
            return False
        self.target.copy_(self.source)
        self._done = True
        self.source = self.target = None
        return True

    def done(self) -> bool:
        return self._done

    def wait(self, timeout_s: float) -> None:
        self._rendezvous.wait_for(self.done, timeout_s)


@dataclass
class _Collective:
    """What each rank contributes, and how many ranks have taken the result."""

    contributions: dict[int, Any] = field(default_factory=dict)
    taken: int = 0


class _Sum:
    """The handle of a sum over ranks, made in rank order, so that all get the same bits."""

    def __init__(self, transport: LocalTransport, tensor: Tensor, key: _SumKey) -> None:
        self._transport = transport
        self._tensor = tensor
        self._key = key

    def done(self) -> bool:
        return self._transport.have_all_come(self._key)

    def wait(self, timeout_s: float) -> None:
        first, *rest = self._transport.take(self._key, timeout_s)
        total = first.clone()
        for other in rest:
            total += other
        self._tensor.detach().copy_(total)


class _OwnersSum(_Sum):
    """The handle of a sum that one rank gets; what the others have there is made useless."""

    def __init__(self, transport: LocalTransport, tensor: Tensor, key: _SumKey, owner: int) -> None:
        super().__init__(transport, tensor, key)
        self._mine = transport.rank == owner

    def wait(self, timeout_s: float) -> None:
        super().wait(timeout_s)
        if not self._mine:
            self._tensor.detach().fill_(torch.nan)


class _Broadcast(_Sum):
    """The handle of a broadcast."""

    def __init__(self, transport: LocalTransport, tensor: Tensor, key: _SumKey, source: int) -> None:
        super().__init__(transport, tensor, key)
        self._place = key[0].ranks.index(source)

    def wait(self, timeout_s: float) -> None:
        self._tensor.detach().copy_(self._transport.take(self._key, timeout_s)[self._place])


class LocalTransport:
    """Moves bytes between threads."""

    def __init__(self, board: LocalBoard, rendezvous: _Rendezvous) -> None:
        self.board = board
        self.rank = board.rank
        self.ranks = board.ranks
        self._rendezvous = rendezvous
        self._unordered: dict[tuple[int, int], int] = {}
        self._everybody = SumGroup("", tuple(range(self.ranks)))
        self._begun: dict[SumGroup, int] = {}

    def send(self, buffer: Tensor, target: int, index: int | None) -> PendingTransfer:
        return self._post(self.rank, target, index, source=buffer)

    def receive(self, buffer: Tensor, source: int, index: int | None) -> PendingTransfer:
        return self._post(source, self.rank, index, target=buffer)

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        """Nothing to do."""

    def all_reduce(self, tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
        return _Sum(self, tensor, self._contribute(tensor.detach().clone(), group or self._everybody))

    def reduce(self, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        return _OwnersSum(self, tensor, self._contribute(tensor.detach().clone(), group), owner)

    def broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingTransfer:
        mine = tensor.detach().clone() if self.rank == source else None
        return _Broadcast(self, tensor, self._contribute(mine, group), source)

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        return self.take(self._contribute(value, self._everybody), timeout_s)

    def have_all_come(self, key: _SumKey) -> bool:
        """Whether every rank of a collective has contributed."""
        return len(self._rendezvous.collectives[key].contributions) == len(key[0].ranks)

    def take(self, key: _SumKey, timeout_s: float) -> list[Any]:
        """What the ranks contributed to a collective, in rank order. Raises: as `PendingTransfer.wait`."""
        collective, ranks = self._rendezvous.collectives[key], key[0].ranks
        self._rendezvous.wait_for(lambda: len(collective.contributions) == len(ranks), timeout_s)
        with self._rendezvous.changed:
            collective.taken += 1
            if collective.taken == len(ranks):
                del self._rendezvous.collectives[key]
        return [collective.contributions[rank] for rank in ranks]

    def interrupt(self) -> None:
        with self._rendezvous.changed:
            self._rendezvous.broken = True
            self._rendezvous.changed.notify_all()

    def close(self) -> None:
        """Nothing to do."""

    def _contribute(self, value: Any, group: SumGroup) -> _SumKey:
        key = group, self._begun.get(group, 0)
        self._begun[group] = key[1] + 1
        with self._rendezvous.changed:
            self._rendezvous.collectives.setdefault(key, _Collective()).contributions[self.rank] = value
            self._rendezvous.changed.notify_all()
        return key

    def _post(
        self,
        sender: int,
        receiver: int,
        index: int | None,
        *,
        source: Tensor | None = None,
        target: Tensor | None = None,
    ) -> PendingTransfer:
        key = self._transfer_key(sender, receiver, index)
        with self._rendezvous.changed:
            transfer = self._rendezvous.transfers.setdefault(key, _LocalTransfer(self._rendezvous))
            transfer.source = transfer.source if source is None else source
            transfer.target = transfer.target if target is None else target
            if transfer.copy_if_both_are_there():
                del self._rendezvous.transfers[key]
                self._rendezvous.changed.notify_all()
        return transfer

    def _transfer_key(self, sender: int, receiver: int, index: int | None) -> _TransferKey:
        if index is not None:
            return (sender, receiver, "message", index)
        number = self._unordered.get((sender, receiver), 0)
        self._unordered[sender, receiver] = number + 1
        return (sender, receiver, "unordered", number)
