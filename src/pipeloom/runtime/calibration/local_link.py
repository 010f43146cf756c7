"""The link between two processes of this machine, from messages as the runtime sends them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import torch

from ...ir.cluster import Link, MiB
from ...ir.errors import CommunicationError
from ..launch import connect, launch, watch_ranks
from ..recorder import HostClock
from ..transports import DistChannel
from .calibrate import measure_link

MESSAGE_BYTES = 4 * MiB
REPEATS = 3


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
        links = [measure_link(channel, MESSAGE_BYTES, HostClock(), device) for _ in range(REPEATS)]
        if channel.rank == 0:
            path.write_bytes(msgspec.json.encode(links))
