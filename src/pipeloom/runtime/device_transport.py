"""Moving bytes between accelerators: by NCCL, or whatever backend torch.distributed has for the device.

Operations of one communicator run one after the other on its stream, so a receive posted ahead would hold
up a later send to the same rank while the peer does the same: neither transfer could start. Therefore each
edge, from one rank to another, is a group of its own, in which one rank only sends and the other only
receives, both in the sender's order. Such a group has one communicator, whether PyTorch makes those of pairs
on demand or, in groups with a `device_id`, one for all ranks at once.

A wait makes the GPU's stream wait and returns at once. A thread looks after those at which the GPU has come
to a halt: it tells the other ranks, and fails this one when that takes too long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented names

from ..ir.errors import ConfigError
from .connect import BACKEND_PATIENCE
from .transport import (
    GlooTransport,
    Group,
    MakeGroup,
    PendingTransfer,
    SumGroup,
    Transport,
    ended_transfer,
    first_line,
)
from .watch import Waiting, Watch

UNREACHED_PATIENCE = BACKEND_PATIENCE / 2
"""For so many times the limit a device may compute in front of a transfer, which may be all of a step. Who
waits for whom is then told before the backend ends the process."""


class Awaited(NamedTuple):
    """A transfer that the computing stream waits for, between two marks: until the device has reached the
    first it has other things to do. PyTorch's own object would keep the tensor alive."""

    waiting: Waiting
    reached: torch.Event
    passed: torch.Event


class StreamWatchdog:
    """Knows which transfer a device's stream waits for, and fails this rank if it does so for longer than the
    limit; or if it does not even come there.

    The main thread may be anywhere at that time, so the error is printed here.
    late: what the device waits for now, since it was seen to be there.
    """

    def __init__(self, watch: Watch, device: torch.device, timeout_s: float) -> None:
        self.watch = watch
        self.late: Waiting | None = None
        watch.device_waits = lambda: self.late
        self._timeout_s = timeout_s
        self._awaited: deque[Awaited] = deque()
        self._next: Awaited | None = None
        self._next_since_s = 0.0
        self._device = device
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeloom-lookout", daemon=True)
        self._thread.start()

    def order(self, work: dist.Work) -> None:
        """Let the computing stream wait for `work`, of which the watch knows what it is."""
        assert self.watch.waiting is not None, "transfers are waited for in `Watch.wait`"
        reached, passed = torch.Event(), torch.Event()
        reached.record()
        work.wait()
        passed.record()
        self._awaited.append(Awaited(self.watch.waiting, reached, passed))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)
        self.late = None

    def _run(self) -> None:
        while not self._closed.wait(0.2):
            if self._awaited:  # in this thread, too: to free a mark would else open the node's first device
                torch.accelerator.set_device_index(self._device)
            while self._awaited and self._awaited[0].passed.query():
                self._awaited.popleft()
                self.late = None
            if not self._awaited:
                continue
            now, first = time.monotonic(), self._awaited[0]
            if first is not self._next:  # the device goes on
                self._next, self._next_since_s = first, now
            if self.late is None and first.reached.query():
                self.late, self._next_since_s = replace(first.waiting, since_s=now), now
            waited_s = now - self._next_since_s
            if waited_s > self._timeout_s * (1 if self.late else UNREACHED_PATIENCE):
                what = first.waiting.what if self.late else f"its device to come to {first.waiting.what}"
                error = self.watch.timeout_error(what, waited_s)
                if self.watch.fail(error, main_thread=False).rank == self.watch.rank:
                    print(error, file=sys.stderr, flush=True)
                return


def device_group(
    store: Store, timeout_s: float, device: torch.device, name: str, rank: int, ranks: int
) -> Group:
    """A group of the backend of a device, apart from all others on the store.

    timeout_s: limit of our own waits.
    """
    backend = dist.get_default_backend_for_device(device)
    if backend != "nccl":
        make = dist.Backend._plugins[backend.upper()].creator_fn
        return make(PrefixStore(name, store), rank, ranks, timedelta(seconds=BACKEND_PATIENCE * timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options.group_name = name  # type: ignore[assignment]  # a NewType; for the flight recorder
    options._timeout = timedelta(seconds=BACKEND_PATIENCE * timeout_s)
    return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, ranks, options)


def connecting_order(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The order in which all ranks connect pairs, each of which blocks both of its ranks.

    As it is one order, nobody waits for ever: both ranks of the first pair that is still to be connected come
    to it next. Pairs of a chain go in four rounds, in each of which no two have a rank in common:

        0 -> 1   2 -> 3   ...      1 -> 0   3 -> 2   ...      1 -> 2   3 -> 4   ...      2 -> 1   4 -> 3   ...

    >>> connecting_order([(0, 1), (1, 0), (1, 2), (2, 3)])
    [(0, 1), (2, 3), (1, 0), (1, 2)]
    """
    return sorted(pairs, key=lambda pair: (min(pair) % 2, pair[0] > pair[1], pair))


class DeviceTransport(Transport):
    """Point-to-point on a group per edge, sums on the given group, control data on a gloo group.

    make: makes further groups of the device's backend.  make_control: makes gloo's.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        watch: Watch,
        *,
        make: MakeGroup,
        make_control: MakeGroup,
        device: torch.device,
        timeout_s: float,
        pairs: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(group, make)
        if group.bound_device_id not in (None, device):
            raise ConfigError(
                f"the process group was made with device_id {group.bound_device_id}, and rank {self.rank} "
                f"computes on {device}",
                hint=f"give the pipeline that device, or the group {device}",
            )
        self._device = device
        self._aborted = False
        self._control = GlooTransport(make_control("control data", self.rank, self.ranks), make_control)
        self._edges: dict[tuple[int, int], Group] = {}
        # Make all communicators now, in one order on all ranks. A communicator is made by the first transfer
        # of its pair and blocks both ends until then; on demand, two ranks could each block for another one.
        # Every other pair of a chain comes first: these have no rank in common, and are made at once.
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        for source, target in connecting_order(
            permutations(range(self.ranks), 2) if pairs is None else pairs
        ):
            if self.rank in (source, target):
                edge = make(f"messages {source} to {target}", int(self.rank == target), 2)
                self._edges[source, target] = edge
                (edge.send if self.rank == source else edge.recv)([token], int(self.rank == source), 0).wait()
        self._lookout = StreamWatchdog(watch, device, timeout_s)

    def send(self, buffer: Tensor, target: int, index: int) -> PendingTransfer:
        try:
            return self._begun(self._edges[self.rank, target].send([buffer], 1, 0))
        except RuntimeError as error:
            return ended_transfer(error)

    def receive(self, buffer: Tensor, source: int, index: int) -> PendingTransfer:
        try:
            return self._begun(self._edges[source, self.rank].recv([buffer], 0, 0))
        except RuntimeError as error:
            return ended_transfer(error)

    def all_reduce(self, tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
        if tensor.device.type != self._device.type:
            assert group is None or len(group.ranks) == self.ranks, "control data goes to all ranks"
            return self._control.all_reduce(tensor)
        return super().all_reduce(tensor, group)

    def reduce(self, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        options = dist.ReduceOptions()
        options.rootRank = group.ranks.index(owner)
        return self._begun(self._open[group].reduce([tensor], options))

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        return self._control.all_gather_object(value, timeout_s)

    def interrupt(self) -> None:
        groups = (*self._edges.values(), self._group, *self._open.values())
        self._aborted = True
        self._control.interrupt()
        for group in groups:  # to abort one may wait for the device, and so for a transfer of another
            threading.Thread(target=_abort, args=(group,), name="pipeloom-abort", daemon=True).start()

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        """Communicators are made here, too: the first sum of a row would block this thread, and take memory,
        while receives are posted."""
        super().open_groups(groups)
        token = torch.zeros(1, device=self._device)
        for group in groups:
            if group in self._open:
                self._open[group].allreduce([token]).wait()

    def close(self) -> None:
        self._lookout.close()
        self._control.close()
        if not self._aborted:  # to shut one down waits for its operations, and these may never end then
            for group in [*self._edges.values(), *self._open.values()][::-1]:
                group.shutdown()
        self._edges.clear()
        self._open.clear()

    def _begun(self, work: dist.Work) -> PendingTransfer:
        return _Enqueued(self._lookout, work)


def _abort(group: Group) -> None:
    with suppress(RuntimeError):  # it has ended already
        group.abort()


@dataclass
class _Enqueued:
    """A transfer on a communicator's stream.  ordered: whether the current stream has been told to wait."""

    lookout: StreamWatchdog
    work: dist.Work
    ordered: bool = False

    def done(self) -> bool:
        """What is done is also before all that the current stream gets from now on, as the next use of its
        buffer."""
        if not self.work.is_completed():
            return False
        if not self.ordered:
            with suppress(RuntimeError):  # it was aborted: the watch knows why
                self.work.wait()
            self.ordered = True
        return True

    def wait(self, timeout_s: float) -> None:
        """Let the current stream wait; returns at once, and the lookout has an eye on the time."""
        if self.ordered:
            return
        try:
            self.lookout.order(self.work)
        except RuntimeError as error:
            raise ConnectionError(first_line(error)) from None
        self.ordered = True
