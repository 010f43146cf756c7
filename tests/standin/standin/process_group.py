"""A backend of torch.distributed for the stand-in, which orders transfers as NCCL does.

A communicator is made by its first operation, for which all its ranks' hosts wait. Its operations are kernels
on one stream, one after the other. Unbatched sends and receives of two ranks have a communicator of their
own, so both directions share a stream; in a group made with `device_id` all transfers share that of the whole
group. A send ends only when it is received. `wait` makes the current stream wait and returns at once. `abort`
ends what hangs.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import NAME, launch, name_stream

BACKEND = "standinccl"


class Communicator:
    """Ranks with a connection between each two, and the stream on which their operations run."""

    def __init__(self, store, name: str, me: int, ranks, device: torch.device, limit: timedelta) -> None:
        """Returns once all its ranks have come. Raises: RuntimeError if they have not within the limit."""
        self.ranks = tuple(ranks)
        self.stream = torch.Stream(device=device)
        name_stream(self.stream, f"communicator {name} (stream {self.stream.stream_id})")
        self._me = me
        self._peers: dict[int, socket.socket] = {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(limit.total_seconds())
            store.set(f"{name}/{me}", str(server.getsockname()[1]))
            for peer in self.ranks[: self.ranks.index(me)]:
                self._peers[peer] = self._reach(store, f"{name}/{peer}", limit)
            for _ in self.ranks[self.ranks.index(me) + 1 :]:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    raise RuntimeError(f"{BACKEND}: not all ranks came to communicator {name}") from None
                self._peers[int.from_bytes(_receive(connection, 4))] = connection
        for connection in self._peers.values():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _reach(self, store: dist.Store, key: str, limit: timedelta) -> socket.socket:
        end = time.monotonic() + limit.total_seconds()
        while not store.check([key]):  # a blocking get would keep other threads from the store
            if time.monotonic() > end:
                raise RuntimeError(f"{BACKEND}: no rank came to {key}")
            time.sleep(0.001)
        connection = socket.create_connection(("127.0.0.1", int(store.get(key))))
        connection.sendall(self._me.to_bytes(4))
        return connection

    def send(self, tensor: Tensor, target: int) -> None:
        connection = self._peers[target]
        _receive(connection, 1)  # the other side is there
        connection.sendall(_bytes(tensor))

    def receive(self, tensor: Tensor, source: int) -> None:
        connection = self._peers[source]
        connection.sendall(b"!")
        raw = bytearray(_receive(connection, tensor.numel() * tensor.element_size()))
        if raw:
            tensor.copy_(torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape))

    def sum(self, tensor: Tensor, root: int) -> None:
        """Into the root's tensor, in the order of ranks."""
        if self._me != root:
            self.send(tensor, root)
            return
        parts = []
        for rank in self.ranks:
            parts.append(tensor.clone(memory_format=torch.contiguous_format))
            if rank != root:
                self.receive(parts[-1], rank)
        tensor.copy_(reduce(torch.add, parts))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        if self._me != root:
            self.receive(tensor, root)
            return
        for rank in self.ranks:
            if rank != root:
                self.send(tensor, rank)

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()

    def abort(self) -> None:
        """Whatever waits for a peer fails; so does the peer."""
        for connection in self._peers.values():
            with suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("the other end is closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Work(dist._Work):
    """An operation that was enqueued. To ask whether it is done orders nothing: the one who asks may be
    another thread than the one that goes on.

    error: why it has ended without being done: it, or the peer's, was aborted.
    """

    def __init__(self, event: torch.Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self._event, self._tensors = event, tensors
        self.ended = threading.Event()
        self.error: ConnectionError | None = None

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def is_success(self) -> bool:
        return self.ended.is_set() and self.error is None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.error is not None:
            raise RuntimeError(f"{BACKEND}: the communicator was aborted: {self.error}")
        torch.accelerator.current_stream().wait_event(self._event)
        self._tensors.clear()
        return True

    synchronize = wait


class StandinGroup(dist.ProcessGroup):
    """See the module."""

    def __init__(self, store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._limit = store, rank, size, limit
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._name = BACKEND
        self._aborted = False
        self.bound: torch.device | None = None

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._name)
    bound_device_id = property(lambda self: self.bound, lambda self, device: setattr(self, "bound", device))

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, name: str) -> None: ...

    def get_group_store(self) -> dist.Store:
        return self._store

    def getBackendName(self) -> str:
        return BACKEND

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        over = self._pair(target, tensors[0].device)
        return self._enqueue(over, "send", lambda t: over.send(t, target), reads=tensors, point_to_point=True)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        over = self._pair(source, tensors[0].device)
        work = over.receive
        return self._enqueue(over, "recv", lambda t: work(t, source), writes=tensors, point_to_point=True)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        assert options is None or options.reduceOp == dist.ReduceOp.SUM
        over = self._all(tensors[0].device)

        def work(tensor: Tensor) -> None:
            over.sum(tensor, 0)
            over.broadcast(tensor, 0)

        return self._enqueue(over, "all_reduce", work, writes=tensors)

    def reduce(self, tensors: list[Tensor], options: Any) -> Work:
        assert options.reduceOp == dist.ReduceOp.SUM
        over, root = self._all(tensors[0].device), options.rootRank
        return self._enqueue(over, "reduce", lambda t: over.sum(t, root), writes=tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        over, root = self._all(tensors[0].device), options.rootRank
        return self._enqueue(over, "broadcast", lambda t: over.broadcast(t, root), writes=tensors)

    def abort(self) -> None:
        self._aborted = True
        for communicator in self._communicators.values():
            communicator.abort()

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            communicator.stream.synchronize()
            communicator.close()

    def _all(self, device: torch.device) -> Communicator:
        return self._communicator(tuple(range(self._size)), "all", device)

    def _pair(self, peer: int, device: torch.device) -> Communicator:
        if self.bound is not None:
            return self._all(device)
        pair = tuple(sorted((self._rank, peer)))
        return self._communicator(pair, f"{pair[0]}-{pair[1]}", device)

    def _communicator(self, ranks: tuple[int, ...], name: str, device: torch.device) -> Communicator:
        key = (*ranks, -1) if name == "all" else ranks
        if key not in self._communicators:
            self._communicators[key] = Communicator(self._store, name, self._rank, ranks, device, self._limit)
        return self._communicators[key]

    def _enqueue(
        self,
        over: Communicator,
        op: str,
        work: Callable[..., None],
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        point_to_point: bool = False,
    ) -> Work:
        if self._aborted:
            raise RuntimeError(f"{BACKEND}: the group was aborted")
        event = torch.Event(device=over.stream.device)
        tensors = [tensor for tensor in (*reads, *writes) if tensor.numel()]
        enqueued = Work(event, [] if point_to_point else tensors)

        def kernel(*seen: Tensor) -> None:
            try:
                work(*seen)
            except ConnectionError as error:
                enqueued.error = error
            enqueued.ended.set()

        over.stream.wait_stream(torch.accelerator.current_stream())
        launch(over.stream, op, kernel, reads=reads, writes=writes)
        for tensor in tensors if point_to_point else ():
            tensor.record_stream(over.stream)
        event.record(over.stream)
        return enqueued


dist.Backend.register_backend(BACKEND, StandinGroup, devices=[NAME])
