"""Joining the ranks: by torchrun's or our launcher's environment, or in a group that the caller made."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.errors import CommunicationError, ConfigError, PipeloomError
from .board import Board
from .watch import UNCAUGHT, Watch

_OURS = threading.Event()
"""Set once torch.distributed was started here, and so is to be ended here."""

_OPEN: WeakSet[Watch] = WeakSet()
"""Of pipelines that have not been closed. A watch over processes is kept alive by its side thread."""

BACKEND_PATIENCE = 10
"""NCCL's own watchdog ends a process without a word of who waits for whom, and counts from when an operation
is posted, which may be long before it is needed: so that of a backend is this many times our waits'."""

EXIT_AFTER_S = 5.0
"""A rank that has not noticed a failure so long after it became known ends hard."""


def connect(
    device: torch.device,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    timeout_s: float = 300.0,
) -> dist.ProcessGroup:
    """The process group of a pipeline; starts torch.distributed if it is not running.

    group: the ranks to use: a process group, or a device mesh with a dimension "pp". None: all ranks.
    timeout_s: limit for all ranks to appear, and of collective operations.
    Raises: ConfigError if no launcher's environment is found, the port is taken, or the mesh has no "pp";
        CommunicationError if not all ranks appear in time.
    """
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if "pp" not in names:
            raise ConfigError(
                f"the device mesh has dimensions {names or '(unnamed)'}, and none is called 'pp'",
                hint='name it: init_device_mesh(device, shape, mesh_dim_names=("dp", "pp"))',
            )
        return group.get_group("pp")
    if group is not None:
        return group
    if not dist.is_initialized():
        _initialise(device, timedelta(seconds=timeout_s))
    world = dist.group.WORLD
    assert world is not None, "torch.distributed was just initialised"
    return world


def watch_ranks(group: dist.ProcessGroup, *, lost_s: float = 60.0) -> Watch:
    """A watch over the ranks of a group; all of them make it, each the same number of times.

    Raises: CommunicationError if the group's store does not answer for `lost_s`.
    """
    rank = group.rank()
    # Our launcher and torchrun's agent serve the store themselves, otherwise the first rank of all does.
    own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    server = (
        next((r for r in range(group.size()) if dist.get_global_rank(group, r) == 0), None) if own else None
    )
    try:
        board = Board(
            group.get_group_store(),
            rank,
            group.size(),
            name=f"pipeloom/{group.group_name}",
            lost_s=lost_s,
            server=server,
        )
    except TimeoutError as error:
        raise CommunicationError(
            f"rank {rank} cannot meet the others: {error}",
            hint="whoever serves it (rank 0, or torchrun's agent on MASTER_ADDR) is frozen or out of reach",
        ) from None
    watch = Watch(board, exit_after_s=EXIT_AFTER_S, hosts_store=own and dist.get_rank() == 0)
    close_at_exit(watch)
    return watch


def close_at_exit(watch: Watch) -> None:
    """End a watch when the script ends, if it has not ended by then."""
    _OPEN.add(watch)
    watch.on_exit(lambda: _OPEN.discard(watch))


def _initialise(device: torch.device, timeout: timedelta) -> None:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise ConfigError(
            f"{', '.join(missing)} not set: this process was not started as one of several ranks",
            hint="start it with torchrun --nproc-per-node N",
        )
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:
        raise ConfigError(
            f"torch.distributed has no backend for {device.type} devices",
            hint="install the one of its vendor, or train on the CPU: --device cpu",
        ) from None
    limit = timeout if device.type == "cpu" else BACKEND_PATIENCE * timeout
    rank, ranks, address, port = (os.environ[name] for name in needed)
    began_s = time.monotonic()
    try:
        dist.init_process_group(backend, timeout=limit)
        _OURS.set()
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"port {port} is in use", hint="choose another MASTER_PORT") from None
        reason, waited_s = str(error).partition("\n")[0], time.monotonic() - began_s
        raise CommunicationError(
            f"rank {rank} did not meet all {ranks} ranks at {address}:{port} in {waited_s:.3g} s: {reason}",
            hint="start all of them, and rank 0 where MASTER_ADDR is; raise timeout_s if one only is slow",
        ) from None


@atexit.register  # when imported: handlers that a script registers after that come first
def _leave_ranks() -> None:
    """Close the pipelines that a script has not closed, then end the groups that are ours.

    Python threads that the interpreter finds in C++ code, as in a call of the store, abort the process. So
    does a thread of gloo that drops a tensor in that moment: it does so right after a collective, and a group
    waits for its threads when its last reference goes.
    """
    with ExitStack() as ended:  # does all of it; Python prints what one of them raises
        ended.callback(_destroy_groups)
        for watch in tuple(_OPEN):
            ended.callback(_end_watch, watch)


def _end_watch(watch: Watch) -> None:
    error = UNCAUGHT[0] if UNCAUGHT else None
    try:
        watch.__exit__(type(error) if error else None, error, None)
    except PipeloomError as problem:
        print(f"pipeloom: {problem}", file=sys.stderr)


def _destroy_groups() -> None:
    if _OURS.is_set() and dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # what has used a group often stands in a cycle that holds one
