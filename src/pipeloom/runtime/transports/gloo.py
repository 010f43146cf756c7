"""Moving bytes with gloo: between CPUs, and control data everywhere.

What gloo does, and what follows from it (seen with torch 2.11 and 2.13):

- A send ends only when its receive is posted, and `is_completed()` of a point-to-point operation
  stays False until someone waits. So that large buffers are freed early, one thread per target waits for
  the sends to it. Small ones are waited for at the end of the step: a thread's wake-up takes longer than
  they do.
- An operation can be waited for once only; a second wait would not return.
- A wait whose time limit passes closes all connections of the group. A wait can therefore not be made in
  slices; but a short wait for a message that nobody sends ends all other waits of this process, and gloo's
  `abort()` does not.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..posted_channel import SMALL_BYTES
from .transport import FailedTransfer, PendingTransfer, SumGroup, in_rounds

MESSAGE_TAGS = 1 << 20
FIRST_TAG = 1 << 30
"""Tags from here on are ours, so a user's own messages on the same group do not mix with the pipeline's."""
UNORDERED_TAG = FIRST_TAG + MESSAGE_TAGS
INTERRUPT_TAG = UNORDERED_TAG + 1

NO_LIMIT = timedelta(days=30)
"""For waits that another wait's time limit covers."""


class GlooTransport:
    """Point-to-point by tag on the given group: no further group is made."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.ranks = group.size()
        self._group = group
        self._sum_groups: dict[SumGroup, dist.ProcessGroup] = {}
        self._to_destroy: list[dist.ProcessGroup] = []
        self._send_waiters: dict[int, _SendWaiter] = {}
        # gloo's own thread lets go of a collective a moment after the wait for it ends. Were it the last one
        # to do so, it would free Python objects, and that crashes while the interpreter shuts down.
        self._last_collective: dist.Work | None = None

    def send(self, buffer: Tensor, target: int, index: int | None) -> PendingTransfer:
        try:
            work = dist.isend(buffer, group=self._group, group_dst=target, tag=_tag(index))
        except RuntimeError as error:
            return FailedTransfer(_first_line(error))
        assert work is not None, "this rank is a member of the group"
        if buffer.numel() <= SMALL_BYTES or index is None:
            return WorkHandle(work)
        waiter = self._send_waiters.get(target)
        if waiter is None:
            waiter = self._send_waiters[target] = _SendWaiter(f"pipeloom-send-{self.rank}-{target}")
        return waiter.put(work)

    def receive(self, buffer: Tensor, source: int, index: int | None) -> PendingTransfer:
        try:
            work = dist.irecv(buffer, group=self._group, group_src=source, tag=_tag(index))
        except RuntimeError as error:
            return FailedTransfer(_first_line(error))
        assert work is not None, "this rank is a member of the group"
        return WorkHandle(work)

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        made = opened(groups, self._group, "gloo")
        self._sum_groups |= made
        self._to_destroy += made.values()

    def all_reduce(self, tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
        over = self._group if group is None else self._sum_groups[group]
        work = dist.all_reduce(tensor, group=over, async_op=True)
        assert work is not None, "this rank is a member of the group"
        self._last_collective = work
        return CollectiveHandle(work)

    def reduce(self, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        """The owner gathers all and adds: gloo's own reduce sends up to twice the bytes. It takes room for as
        many tensors as there are ranks."""
        over, mine = self._sum_groups[group], self.rank == owner
        parts = [torch.empty_like(tensor) for _ in group.ranks] if mine else None
        place = group.ranks.index(owner)
        work = dist.gather(tensor, parts, group=over, group_dst=place, async_op=True)
        assert work is not None, "this rank is a member of the group"
        self._last_collective = work
        return CollectiveHandle(work) if parts is None else _GatheredSum(work, tensor, parts)

    def broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingTransfer:
        over = self._sum_groups[group]
        work = dist.broadcast(tensor, group=over, group_src=group.ranks.index(source), async_op=True)
        assert work is not None, "this rank is a member of the group"
        self._last_collective = work
        return CollectiveHandle(work)

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
        self._to_destroy.clear()  # a group waits for its operations, and these may never end
        for peer in range(self.ranks):
            if peer == self.rank:
                continue
            try:
                nobody_sends_this = torch.empty(1, dtype=torch.uint8)
                work = dist.irecv(nobody_sends_this, group=self._group, group_src=peer, tag=INTERRUPT_TAG)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # that is the purpose; or the connection to this peer has ended already

    def close(self) -> None:
        for waiter in self._send_waiters.values():
            waiter.close()
        destroy(self._to_destroy)

    def _all_gather(self, tensor: Tensor, timeout_s: float) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
        work = dist.all_gather(gathered, tensor, group=self._group, async_op=True)
        assert work is not None, "this rank is a member of the group"
        self._last_collective = work
        WorkHandle(work).wait(timeout_s)
        return gathered


def opened(
    groups: Sequence[SumGroup], over: dist.ProcessGroup, backend: str, limit: timedelta | None = None
) -> dict[SumGroup, dist.ProcessGroup]:
    """Those of some groups that this rank is in; all ranks of `over` call it with the same ones.

    limit: of their operations, where no limit of ours is given to each wait; None for torch's.
    """
    members, rank = dist.get_process_group_ranks(over), over.rank()
    whole = over.size() == dist.get_world_size()  # then all processes come here
    if groups and not whole:
        _open_as_many_as_others(over, backend)
    made = {}
    for group in groups if whole else in_rounds(groups, rank):
        inside = dist.new_group(
            [members[other] for other in group.ranks],
            timeout=limit,
            backend=backend,
            use_local_synchronization=not whole,
            group_desc=f"pipeloom-{group.name}",
        )
        if rank in group.ranks:
            made[group] = inside
    return made


def destroy(groups: list[dist.ProcessGroup]) -> None:
    """Destroy groups, the last one first, unless this process is in a group that only a part of all processes
    opened.

    torch names such a group after its ranks and the number of groups that the process is in. If that number
    fell, a new group could get the name of an earlier one, and find that one's addresses in the store: gloo
    then tries to reach them until its limit passes. Groups that all processes open are named by a counter.
    """
    names = dist.distributed_c10d._world.pg_names
    if not all(name.isdigit() for name in names.values()):
        return
    for group in groups[::-1]:
        if group in names:  # a script may have ended all groups, and may close twice
            dist.destroy_process_group(group)


def _open_as_many_as_others(over: dist.ProcessGroup, backend: str) -> None:
    """Open groups of this rank alone until all ranks of `over` are in equally many: see `in_rounds`. They may
    have come here from other groups, of the user or of earlier pipelines."""
    own = len(dist.distributed_c10d._world.pg_names)
    counts: list[int] = [own] * over.size()
    dist.all_gather_object(counts, own, group=over)
    for _ in range(max(counts) - own):
        dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)


class WorkHandle:
    """Waits for an operation in the calling thread."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work
        self._done = False

    def done(self) -> bool:
        return self._done

    def wait(self, timeout_s: float) -> None:
        start = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - start >= 0.99 * timeout_s:
                raise TimeoutError from None
            raise ConnectionError(_first_line(error)) from None
        self._done = True


class CollectiveHandle(WorkHandle):
    """Of a sum: unlike point-to-point operations, it is known when it has ended."""

    def done(self) -> bool:
        return self._done or self._work.is_completed()


class _GatheredSum(CollectiveHandle):
    """Of a sum that this rank makes of what it has gathered, in rank order."""

    def __init__(self, work: dist.Work, tensor: Tensor, parts: list[Tensor]) -> None:
        super().__init__(work)
        self._tensor = tensor
        self._parts = parts

    def wait(self, timeout_s: float) -> None:
        super().wait(timeout_s)
        first, *rest = self._parts
        self._tensor.copy_(first)
        for other in rest:
            self._tensor += other
        self._parts = [self._tensor]


class _SendWaiter:
    """The large sends to one rank, and the thread that waits for them one after the other."""

    def __init__(self, name: str) -> None:
        self.completed = 0
        self.error = ""
        self._posted = 0
        self._queue: queue.SimpleQueue[dist.Work | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: dist.Work) -> PendingTransfer:
        self._queue.put(work)
        self._posted += 1
        return _LargeSend(self, self._posted)

    def wait_for_all(self, timeout_s: float) -> bool:
        """Wait until all sends so far have ended, well or not; False if the time passes first."""
        event = threading.Event()
        self._queue.put(event)
        return event.wait(timeout_s)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                item.wait(NO_LIMIT)
                self.completed += 1
            except RuntimeError as error:
                self.error = _first_line(error)


class _LargeSend:
    """The `number`-th send of a waiter, counted from 1."""

    def __init__(self, waiter: _SendWaiter, number: int) -> None:
        self._waiter = waiter
        self._number = number

    def done(self) -> bool:
        return self._waiter.completed >= self._number

    def wait(self, timeout_s: float) -> None:
        if self.done():
            return
        if not self._waiter.wait_for_all(timeout_s):
            raise TimeoutError
        if not self.done():
            raise ConnectionError(self._waiter.error)


def _tag(index: int | None) -> int:
    return UNORDERED_TAG if index is None else FIRST_TAG + index % MESSAGE_TAGS


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
