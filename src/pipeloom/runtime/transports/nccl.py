"""Moving bytes with NCCL: between GPUs.

Operations of one communicator run one after the other on its stream, so a receive posted ahead would hold
up a later send to the same rank while the peer does the same: neither transfer could start. Therefore there
are two groups: one for transfers to higher ranks and one for transfers to lower ranks. In each of them a
pair of ranks has its own communicator, in which one rank only sends and the other only receives, both in
the sender's order.

A wait makes the GPU's stream wait and returns at once; a thread looks after the transfers that do not end.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...ir.errors import ConfigError
from ..failure.watch import Watch
from ..launch.connect import NCCL_PATIENCE
from .gloo import GlooTransport, destroy, opened
from .transport import FailedTransfer, PendingTransfer, SumGroup


class StreamWork(Protocol):
    """What is used of a torch.distributed operation."""

    def is_completed(self) -> bool: ...


@dataclass
class _Awaited:
    work: StreamWork
    what: str
    since_s: float


class StreamWatchdog:
    """Notices transfers that a device's stream waits for longer than the limit; fails this rank then.

    The main thread may be anywhere at that time, so the error is printed here.
    """

    def __init__(self, watch: Watch, timeout_s: float) -> None:
        self._watch = watch
        self._timeout_s = timeout_s
        self._awaited: deque[_Awaited] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeloom-lookout", daemon=True)
        self._thread.start()

    def add(self, work: StreamWork, what: str) -> None:
        """Look after a transfer from now on."""
        self._awaited.append(_Awaited(work, what, time.monotonic()))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._closed.wait(0.2):
            while self._awaited and self._awaited[0].work.is_completed():
                self._awaited.popleft()
            if not self._awaited:
                continue
            oldest = self._awaited[0]
            waited_s = time.monotonic() - oldest.since_s
            if waited_s > self._timeout_s:
                error = self._watch.timeout_error(oldest.what, waited_s)
                if self._watch.fail(error, main_thread=False).rank == self._watch.rank:
                    print(error, file=sys.stderr, flush=True)
                return


class NcclTransport:
    """Point-to-point on two groups, sums on the given group, control data on a gloo group.

    backend: of the two groups; another one than NCCL serves tests.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        watch: Watch,
        *,
        device: torch.device,
        timeout_s: float,
        pairs: Iterable[tuple[int, int]] | None = None,
        backend: str = "nccl",
    ) -> None:
        self.rank = group.rank()
        self.ranks = group.size()
        if group.bound_device_id is not None and self.ranks > 2:
            # Such a group makes one communicator for all ranks at once and puts every transfer on its one
            # stream, where a receive from one rank blocks a send to another.
            raise ConfigError(
                "the process group was made with device_id, which serialises all its transfers",
                hint="call init_process_group without device_id",
            )
        self._group = group
        self._device = device
        self._backend = backend
        self._sum_groups: dict[SumGroup, dist.ProcessGroup] = {}
        self._limit = timedelta(seconds=NCCL_PATIENCE * timeout_s)
        self._to_higher = _same_ranks(group, backend, self._limit)
        self._to_lower = _same_ranks(group, backend, self._limit)
        control = _same_ranks(group, "gloo", timedelta(seconds=timeout_s))
        self._control = GlooTransport(control)
        self._to_destroy = [self._to_higher, self._to_lower, control]
        self._connect(
            sorted(pairs) if pairs is not None else list(permutations(range(self.ranks), 2)), device
        )
        self._lookout = StreamWatchdog(watch, timeout_s)

    def send(self, buffer: Tensor, target: int, index: int | None) -> PendingTransfer:
        group = self._lane(self.rank, target, index)
        try:
            work = dist.isend(buffer, group=group, group_dst=target)
        except RuntimeError as error:
            return FailedTransfer(str(error).splitlines()[0])
        assert work is not None, "this rank is a member of the group"
        return _Enqueued(self._lookout, work, f"rank {target} to receive message {index}")

    def receive(self, buffer: Tensor, source: int, index: int | None) -> PendingTransfer:
        group = self._lane(source, self.rank, index)
        try:
            work = dist.irecv(buffer, group=group, group_src=source)
        except RuntimeError as error:
            return FailedTransfer(str(error).splitlines()[0])
        assert work is not None, "this rank is a member of the group"
        return _Enqueued(self._lookout, work, f"message {index} from rank {source}")

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        made = opened(groups, self._group, self._backend, self._limit)
        self._sum_groups |= made
        self._to_destroy += made.values()

    def all_reduce(self, tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
        if tensor.device.type != self._device.type:
            assert group is None or len(group.ranks) == self.ranks, "control data goes to all ranks"
            return self._control.all_reduce(tensor)
        over = self._group if group is None else self._sum_groups[group]
        work = dist.all_reduce(tensor, group=over, async_op=True)
        assert work is not None, "this rank is a member of the group"
        return _Enqueued(self._lookout, work, "a sum over all ranks")

    def reduce(self, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        over = self._sum_groups[group]
        work = dist.reduce(tensor, group=over, group_dst=group.ranks.index(owner), async_op=True)
        assert work is not None, "this rank is a member of the group"
        return _Enqueued(self._lookout, work, f"a sum for rank {owner}")

    def broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingTransfer:
        over = self._sum_groups[group]
        work = dist.broadcast(tensor, group=over, group_src=group.ranks.index(source), async_op=True)
        assert work is not None, "this rank is a member of the group"
        return _Enqueued(self._lookout, work, f"parameters from rank {source}")

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        return self._control.all_gather_object(value, timeout_s)

    def interrupt(self) -> None:
        self._to_destroy.clear()
        self._control.interrupt()
        for group in (self._to_higher, self._to_lower, self._group, *self._sum_groups.values()):
            try:
                group.abort()
            except RuntimeError:
                pass  # it has ended already

    def close(self) -> None:
        self._lookout.close()
        self._control.close()
        destroy(self._to_destroy)

    def _lane(self, source: int, target: int, index: int | None) -> dist.ProcessGroup:
        if index is None:  # both ends wait for each of these before the next one, so one group does
            return self._group
        return self._to_higher if target > source else self._to_lower

    def _connect(self, pairs: list[tuple[int, int]], device: torch.device) -> None:
        """Make all communicators now, in one order on all ranks.

        A communicator is made by the first transfer of its pair and blocks both ends until then; made on
        demand, two ranks could each block for another one.
        """
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        for source, target in pairs:
            group = self._lane(source, target, 0)
            if self.rank == source:
                dist.send(token, group=group, group_dst=target)
            elif self.rank == target:
                dist.recv(token, group=group, group_src=source)


class _Enqueued:
    """A transfer on a communicator's stream."""

    def __init__(self, lookout: StreamWatchdog, work: dist.Work, what: str) -> None:
        self._lookout = lookout
        self._work = work
        self._what = what

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        """Let the current stream wait; returns at once, and the lookout has an eye on the time."""
        self._work.wait()
        self._lookout.add(self._work, self._what)


def _same_ranks(group: dist.ProcessGroup, backend: str, limit: timedelta) -> dist.ProcessGroup:
    """Another group of the same ranks."""
    ranks = dist.get_process_group_ranks(group)
    new_group = dist.new_group(
        ranks,
        timeout=limit,
        backend=backend,
        # Ranks outside this pipeline do not take part. Groups are then told apart by how many groups each
        # rank has made, so the ranks of one pipeline must have made the same groups before.
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(new_group, dist.ProcessGroup), "this rank is a member of the group"
    return new_group
