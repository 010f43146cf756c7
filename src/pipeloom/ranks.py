"""This process as a rank: its device, and joining the others."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .ir.errors import CommunicationError, ConfigError, PipeloomError, PlanError
from .ir.plan import Plan
from .ir.schedule import Program
from .ir.text import to_json
from .run_options import Options
from .runtime.channel import Channel, dist_channel, local_channels
from .runtime.checkpoint_directory import newest, read_index, verify_sizes
from .runtime.connect import close_at_exit, connect, watch_ranks
from .runtime.watch import Watch


def usable_device(name: str) -> torch.device:
    """name: as "cpu", "cuda" or "cuda:1"."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    accelerator = torch.accelerator.current_accelerator()
    known = {"cpu", "cuda"} | ({accelerator.type} if accelerator else set())
    if device is None or device.type not in known:
        usable = " or ".join(f'"{each}"' for each in sorted(known))
        raise ConfigError(f"{name!r} is no device that pipeloom runs on", hint=f"use {usable}")
    if device.type != "cpu" and (device.index or 0) >= (
        count := torch.get_device_module(device).device_count()
    ):
        seen = f"only {count} of that type" if count else "none of that type"
        raise ConfigError(
            f"the device {name!r} was asked for, PyTorch sees {seen} here",
            hint=f'use "{device.type}" or "cpu"' if count else 'use "cpu"',
        )
    return device


T = TypeVar("T")

LOST_S = 60.0
"""A rank that gives no sign of life for so long has failed, where `Options.timeout_s` is not shorter."""


def result_of_rank_0(group: dist.ProcessGroup, make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank; its error too, since the others must not wait for a
    result. Every rank calls it. However long it takes: the others begin no operation that has a limit before
    it is there."""
    store, rank = group.get_group_store(), group.rank()
    made = f"pipeloom/results/{group.group_name}/{store.add(f'pipeloom/results/{rank}', 1)}"
    message: list[Any] = [None, None]
    if rank == 0:
        try:
            message[0] = make()
        except PipeloomError as error:
            message[1] = error
        except BaseException as error:
            store.set(made, type(error).__name__)
            raise
        store.set(made, "")
    else:
        _await_key(group, made)
        if failed := store.get(made).decode():
            raise CommunicationError(
                f"rank {rank} gets no result from rank 0, which failed: {failed}",
                hint="see what rank 0 printed",
            )
    dist.broadcast_object_list(message, group_src=0, group=group)
    value, problem = message
    if problem is not None:
        raise problem
    result: T = value
    return result


def _await_key(group: dist.ProcessGroup, key: str) -> None:
    """Wait for a key of the group's store; in Python, where Ctrl-C is heard."""
    try:
        while not group.get_group_store().check([key]):
            time.sleep(0.05)
    except dist.DistError as error:
        raise CommunicationError(
            f"no result came from rank 0: {str(error).splitlines()[0]}",
            hint="see what rank 0 printed, or whether it was killed",
        ) from None


def join_ranks(
    plan: Plan,
    device: torch.device,
    options: Options,
    *,
    group: dist.ProcessGroup | DeviceMesh | None,
    channel: Channel | None,
) -> tuple[Watch, Callable[[Program], Channel]]:
    """Meet the other ranks. A plan for one rank needs no others, unless the caller has a group.

    Returns: also what opens this rank's channel to the others for the messages of a program.
    """
    if channel is None and group is None and plan.ranks == 1 and not dist.is_initialized():
        channel = local_channels(1, timeout_s=options.timeout_s)[0]
    if channel is not None:
        close_at_exit(channel.watch)
        return channel.watch, lambda program: channel
    timeout_s = options.timeout_s
    joined = connect(device, group=group, timeout_s=timeout_s)
    watch = watch_ranks(joined, lost_s=min(LOST_S, timeout_s))
    echo = {(0, 1), (1, 0)} if plan.ranks > 1 else set()  # whose link a forecast measures
    return watch, lambda program: dist_channel(
        joined, watch, device=device, timeout_s=timeout_s, pairs={*program.messages, *echo}
    )


def require_same_plan(watch: Watch, plan: Plan, timeout_s: float) -> None:
    """Refuse, on all ranks, to start with different plans. Every rank calls it."""
    digests = watch.gather(hashlib.sha256(to_json(plan).encode()).hexdigest()[:12], timeout_s)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise PlanError(
                f"rank {rank} has another plan ({digest}) than rank 0 ({digests[0]})",
                hint="give every rank the same plan.json",
            )


def rank_device(options: Options) -> torch.device:
    """The device that this rank computes on, from now on the current one; called before anything that makes
    one of it. "cuda" is the one of the rank's number on its node, where a launcher gives that."""
    device = usable_device(options.device)
    if options.tf32 is not None:
        torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    if device.type == "cpu":
        return device
    # Hardware queues, for CUDA. A receive that waits holds up whatever shares its queue, and a rank has more
    # streams than the 8 queues of the default: ranks could wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if device.index is None:
        module = torch.get_device_module(device)
        local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
        if local_rank >= (count := module.device_count()):
            seen = "1 device" if count == 1 else f"{count} devices"
            raise ConfigError(
                f"rank {local_rank} of this node has no device of its own: PyTorch sees {seen} of type "
                f"{device.type} here",
                hint=f"start at most {count} per node; or, if each rank is shown another device only, name "
                f'it: "{device.type}:0"',
            )
        # Without a launcher the process keeps its current device.
        device = torch.device(device.type, local_rank if local_rank >= 0 else int(module.current_device()))
    torch.get_device_module(device).set_device(device)
    return device


CAP_SLACK = 1.05
"""What an allocator may take over a rank's cap: it rounds sizes up, and kernels have workspaces that no plan
counts."""


def limit_memory(device: torch.device, cap_bytes: int) -> Callable[[], None]:
    """Let the allocator of a device refuse what passes a rank's cap, on top of what this process has there by
    now. Returns what ends that."""
    limit = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if limit is None:
        return lambda: None
    _, whole = torch.accelerator.get_memory_info(device)
    most = torch.accelerator.memory_allocated(device) + CAP_SLACK * cap_bytes
    limit(min(1.0, most / whole), device)
    return lambda: limit(1.0, device)


def checkpoint_step(directory: Path) -> int:
    """Steps done in the newest checkpoint, whose files are looked at but not read."""
    path = newest(directory)
    index = read_index(path)
    verify_sizes(path, index)
    return index.step
