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
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented names

from ..ir.errors import ConfigError
from .connect import NCCL_PATIENCE
from .transport import FailedTransfer, GlooTransport, Group, MakeGroup, OpenGroups, PendingTransfer, SumGroup
from .watch import Watch


class StreamWatchdog:
    """Notices transfers that a device's stream waits for longer than the limit; fails this rank then.

    The main thread may be anywhere at that time, so the error is printed here.
    """

    def __init__(self, watch: Watch, timeout_s: float) -> None:
        self._watch = watch
        self._timeout_s = timeout_s
        self._awaited: deque[tuple[dist.Work, str, float]] = deque()  # for what, since when
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeloom-lookout", daemon=True)
        self._thread.start()

    def add(self, work: dist.Work, what: str) -> None:
        self._awaited.append((work, what, time.monotonic()))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._closed.wait(0.2):
            while self._awaited and self._awaited[0][0].is_completed():
                self._awaited.popleft()
            if not self._awaited:
                continue
            _, what, since_s = self._awaited[0]
            waited_s = time.monotonic() - since_s
            if waited_s > self._timeout_s:
                error = self._watch.timeout_error(what, waited_s)
                if self._watch.fail(error, main_thread=False).rank == self._watch.rank:
                    print(error, file=sys.stderr, flush=True)
                return


def nccl_group(
    store: Store, timeout_s: float, device: torch.device, name: str, rank: int, ranks: int
) -> Group:
    """A group of NCCL's, or of another device's backend, apart from all others on the store.

    timeout_s: limit of our own waits.
    """
    backend = dist.get_default_backend_for_device(device)
    if backend != "nccl":
        make = dist.Backend._plugins[backend.upper()].creator_fn
        return make(PrefixStore(name, store), rank, ranks, timedelta(seconds=NCCL_PATIENCE * timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NCCL_PATIENCE * timeout_s)
    return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, ranks, options)


def connecting_order(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """
    >>> connecting_order([(0, 1), (1, 0), (1, 2), (2, 3)])
    [(0, 1), (2, 3), (1, 0), (1, 2)]
    """
    return sorted(pairs, key=lambda pair: (min(pair) % 2, pair[0] > pair[1], pair))


class NcclTransport:
    """Point-to-point on two groups, sums on the given group, control data on a gloo group.

    make: makes further groups of NCCL's.  make_control: makes gloo's.
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
        self._open = OpenGroups(self.rank, make)
        self._to_higher = make("to higher ranks", self.rank, self.ranks)
        self._to_lower = make("to lower ranks", self.rank, self.ranks)
        self._control = GlooTransport(make_control("control data", self.rank, self.ranks), make_control)
        self._to_shut_down = [self._to_higher, self._to_lower]
        # Make all communicators now, in one order on all ranks. A communicator is made by the first transfer
        # of its pair and blocks both ends until then; on demand, two ranks could each block for another one.
        # Every other pair of a chain comes first: these have no rank in common, and are made at once.
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        for source, target in connecting_order(
            permutations(range(self.ranks), 2) if pairs is None else pairs
        ):
            if self.rank == source:
                self._lane(source, target).send([token], target, 0).wait()
            elif self.rank == target:
                self._lane(source, target).recv([token], source, 0).wait()
        self._lookout = StreamWatchdog(watch, timeout_s)

    def send(self, buffer: Tensor, target: int, index: int) -> PendingTransfer:
        try:
            work = self._lane(self.rank, target).send([buffer], target, 0)
        except RuntimeError as error:
            return FailedTransfer(error)
        return _Enqueued(self._lookout, work, f"rank {target} to receive message {index}")

    def receive(self, buffer: Tensor, source: int, index: int) -> PendingTransfer:
        try:
            work = self._lane(source, self.rank).recv([buffer], source, 0)
        except RuntimeError as error:
            return FailedTransfer(error)
        return _Enqueued(self._lookout, work, f"message {index} from rank {source}")

    def open_groups(self, groups: Sequence[SumGroup]) -> None:
        self._open.open(groups)

    def all_reduce(self, tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
        if tensor.device.type != self._device.type:
            assert group is None or len(group.ranks) == self.ranks, "control data goes to all ranks"
            return self._control.all_reduce(tensor)
        over = self._group if group is None else self._open[group]
        return _Enqueued(self._lookout, over.allreduce([tensor]), "a sum over all ranks")

    def reduce(self, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        options = dist.ReduceOptions()
        options.rootRank = group.ranks.index(owner)
        work = self._open[group].reduce([tensor], options)
        return _Enqueued(self._lookout, work, f"a sum for rank {owner}")

    def broadcast(self, tensor: Tensor, group: SumGroup, source: int) -> PendingTransfer:
        options = dist.BroadcastOptions()
        options.rootRank = group.ranks.index(source)
        work = self._open[group].broadcast([tensor], options)
        return _Enqueued(self._lookout, work, f"parameters from rank {source}")

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        return self._control.all_gather_object(value, timeout_s)

    def interrupt(self) -> None:
        self._to_shut_down.clear()  # to shut one down waits for its operations, and these may never end
        self._control.interrupt()
        for group in (self._to_higher, self._to_lower, self._group, *self._open.all()):
            with suppress(RuntimeError):  # it has ended already
                group.abort()

    def close(self) -> None:
        self._lookout.close()
        self._control.close()
        if self._to_shut_down:
            for group in [*self._open.all()[::-1], *self._to_shut_down[::-1]]:
                group.shutdown()
        self._to_shut_down.clear()
        self._open.clear()

    def _lane(self, source: int, target: int) -> Group:
        return self._to_higher if target > source else self._to_lower


@dataclass
class _Enqueued:
    """A transfer on a communicator's stream.  ordered: whether the current stream has been told to wait."""

    lookout: StreamWatchdog
    work: dist.Work
    what: str
    ordered: bool = False

    def done(self) -> bool:
        """What is done is also before all that the current stream gets from now on, as the next use of its
        buffer."""
        if not self.work.is_completed():
            return False
        with suppress(RuntimeError):  # it was aborted: the watch knows why
            self._order()
        return True

    def wait(self, timeout_s: float) -> None:
        """Let the current stream wait; returns at once, and the lookout has an eye on the time."""
        self._order()
        self.lookout.add(self.work, self.what)

    def _order(self) -> None:
        if not self.ordered:
            self.work.wait()
            self.ordered = True
