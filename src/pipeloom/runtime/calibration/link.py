"""The link between two ranks, measured from messages as the runtime sends them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import torch

from ...ir.cluster import Link, MiB
from ...ir.errors import CommunicationError
from ...ir.graph import Value
from ..launch.connect import connect, watch_ranks
from ..launch.launch import launch
from ..messages import Message
from ..posted_channel import PostedChannel
from ..recorder import Clock, HostClock
from ..transports.dist_channel import DistChannel

ECHOES = 25
"""Echoes of each size, of which the first warms up."""

WRITTEN_BYTES, MATRIX_SIZE, PRODUCTS = 1 << 24, 384, 2
"""Work before each message, as a step's come after an action: memory written, and the size and number of
matrix products. Data and code then have left the caches, the processor is busy with wide arithmetic, and a
message takes about twice as long as after a pause."""

QUANTILE = 0.1
"""Of the echoes, sorted by time, the one at this share counts. What other processes of the machine do to a
message is not added to a step: a rank kept waiting for a core now computes undisturbed for longer afterwards,
and the rehearsed actions have their share of it already."""


def measure_link(channel: PostedChannel, size: int, clock: Clock, device: torch.device) -> Link:
    """The link between ranks 0 and 1, from echoes of 8 bytes and of `size` bytes.

    With one-way times t(8) and t(size), of which the sender itself is busy for o(8) and o(size):

        time on the link per byte = (t(size) - t(8) - (o(size) - o(8))) / (size - 8)
        latency                   = t(8) - o(8)

    Every rank calls it; all get the same answer. A rank that waits for a message pays for its arrival last,
    so that is not part of the latency.

    size: bytes of the long message, at least 16 KiB.
    Raises: CommunicationError, PeerError as the channel does.
    """
    size = max(size // 4, 4096) * 4
    small, large = (_echo(channel, length, clock, device) for length in (8, size))
    (one_way_s, sender_s), (large_one_way_s, large_sender_s) = channel.broadcast_object((small, large))
    sender_s_per_byte = max(0.0, large_sender_s - sender_s) / (size - 8)
    s_per_byte = max((large_one_way_s - one_way_s) / (size - 8) - sender_s_per_byte, 1e-15)
    return Link(
        bandwidth_bytes_per_s=1 / s_per_byte,
        latency_s=max(0.0, one_way_s - sender_s),
        overhead_s=sender_s,
        overhead_s_per_byte=sender_s_per_byte,
    )


def _echo(channel: PostedChannel, size: int, clock: Clock, device: torch.device) -> tuple[float, float]:
    """Seconds one way, and of these how long the sender itself is busy; on rank 0.

    rank 0   work, send ───────▶                     ▶ receive
    rank 1                receive, work, send ───────┘
    """
    if channel.ranks == 1:
        return 1e-6, 0.0
    value = Value(name="echo", shape=(size // 4,), dtype="float32")
    there = [Message(key=f"there{i}", source=0, target=1, values=(value,)) for i in range(ECHOES)]
    back = [Message(key=f"back{i}", source=1, target=0, values=(value,)) for i in range(ECHOES)]
    data = torch.zeros(value.shape, device=device)
    channel.begin(there if channel.rank == 1 else back if channel.rank == 0 else [])
    sums, sending = [], []
    cold = torch.empty(WRITTEN_BYTES, dtype=torch.uint8, device=device)
    matrix = torch.zeros(MATRIX_SIZE, MATRIX_SIZE, device=device)

    def work_and_send(message: Message) -> tuple[object, object]:
        cold.fill_(1)
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        fresh = data.clone()  # as a step sends what was just made
        start = clock.mark()
        channel.send(message, [fresh])
        return start, clock.mark()

    def take(message: Message) -> object:
        channel.receive(message)
        channel.release(message)
        return clock.mark()

    for out, home in zip(there, back, strict=True):
        if channel.rank == 0:
            begin, sent = work_and_send(out)
            sums.append(clock.seconds(begin, take(home)))
        elif channel.rank == 1:
            came = take(out)
            begin, sent = work_and_send(home)
            sums.append(-clock.seconds(came, begin))
        if channel.rank < 2:
            sending.append(clock.seconds(begin, sent))
    channel.end()
    # The time between arrival and reply is on rank 1's clock: only the sum of both ranks' times is known.
    mine, theirs, *_ = channel.all_gather_object((sums[1:], sending[1:]))
    one_way = [(a + b) / 2 for a, b in zip(mine[0], theirs[0], strict=True)]
    return _quantile(one_way), _quantile([*mine[1], *theirs[1]])


def _quantile(times: list[float]) -> float:
    return sorted(times)[int(QUANTILE * len(times))]


def local_links() -> list[Link]:
    """The link measured a few times over, between two new processes with one thread each (gloo, loopback).

    Raises: CommunicationError if one of them fails; what it failed with has then been printed.
    """
    with tempfile.TemporaryDirectory(prefix="pipeloom-link-") as folder:
        path = Path(folder) / "links.json"
        if status := launch(_measure, 2, args=(path,)):
            raise CommunicationError(
                f"two processes that send each other messages ended with exit status {status}",
                hint="what they printed says why",
            )
        return msgspec.json.decode(path.read_bytes(), type=list[Link])


def _measure(path: Path) -> None:
    device = torch.device("cpu")
    torch.set_num_threads(1)
    group = connect(device)
    with watch_ranks(group) as watch:
        channel = DistChannel(group, watch, device=device)
        links = [measure_link(channel, 4 * MiB, HostClock(), device) for _ in range(3)]
        if channel.rank == 0:
            path.write_bytes(msgspec.json.encode(links))
