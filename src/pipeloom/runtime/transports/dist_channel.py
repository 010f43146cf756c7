"""A pipeline's channel over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from ..failure.watch import Watch
from ..posted_channel import PostedChannel
from .gloo import GlooTransport
from .nccl import NcclTransport
from .transport import Transport


class DistChannel(PostedChannel):
    """One process's channel: gloo between CPUs, NCCL between GPUs.

    group: the ranks of this pipeline; a channel rank is a rank of this group. On the CPU it is used as it is;
        on a GPU two more NCCL groups and one of gloo are made, so all its ranks make the channel together.
    watch: entered by the caller before the first step.
    pairs: (source, target) of all messages, if known; on a GPU only these get connections.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        watch: Watch,
        *,
        device: torch.device,
        ahead: int = 2,
        timeout_s: float = 300.0,
        on_change: Callable[[int], None] | None = None,
        pairs: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        transport: Transport
        if device.type == "cpu":
            transport = GlooTransport(group)
        else:
            transport = NcclTransport(group, watch, device=device, timeout_s=timeout_s, pairs=pairs)
        super().__init__(
            transport, watch, device=device, ahead=ahead, timeout_s=timeout_s, on_change=on_change
        )
