"""What the processes of test_channel_of_processes.py run, as a script: `dist_targets.py NAME`."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanges import all_to_all, number, sums_and_objects
from plain_net import two_linears
from processes import until
from torch.distributed.device_mesh import init_device_mesh

from pipeloom import Pipeline
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.errors import ConfigError, PeerError
from pipeloom.planning import plan
from pipeloom.ranks import result_of_rank_0
from pipeloom.runtime import checkpoint_directory as files
from pipeloom.runtime.channel import Channel, dist_channel
from pipeloom.runtime.connect import connect, watch_ranks
from pipeloom.runtime.device_transport import DeviceTransport
from pipeloom.runtime.transport import SumGroup, gloo_group

CPU = torch.device("cpu")


@contextmanager
def channel_on(group: dist.ProcessGroup) -> Iterator[Channel]:
    with watch_ranks(group) as watch:
        yield dist_channel(group, watch, device=CPU, timeout_s=1000.0)


def exchange_then_fail() -> None:
    """Several things that need real processes, one after the other, as each start takes seconds."""
    world = connect(CPU)
    rank = world.rank()
    _nobody_else_can_reach_them()
    with channel_on(world) as channel:
        assert (channel.rank, channel.ranks) == (rank, 3)
        all_to_all(channel, CPU)
        assert channel.held_bytes == 0
        sums_and_objects(channel, CPU)
    _sub_group(rank)
    _meshes(world)
    _control_data(world)
    print("all well")
    fail_while_others_wait()


LISTENS = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def _nobody_else_can_reach_them() -> None:
    """The ranks of one machine, and what launched them, listen on its loopback interface only, as
    SECURITY.md says."""
    if sys.platform != "linux":
        return
    dist.all_reduce(torch.ones(1))
    found = [address for pid in (os.getpid(), os.getppid()) for address in _listening(pid)]
    assert found and set(found) <= LOOPBACK, found
    dist.barrier()


def _listening(pid: int) -> list[str]:
    """Addresses on which a process listens, as /proc writes them."""
    links = [file for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    held = {os.readlink(file) for file in links if os.path.lexists(file)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").open()]
    return [row[1].split(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in held]


def _sub_group(rank: int) -> None:
    """Ranks 2 and 0 of the world are 1 and 0 of the pipeline; the world's own messages do not disturb. In
    another group rank 1 of the world is the first, which plans."""
    others, group = dist.new_group([1, 2]), dist.new_group([0, 2])
    assert rank == 0 or result_of_rank_0(others, lambda: f"planned by {rank}") == "planned by 1"
    if rank == 1:
        return
    with channel_on(group) as channel:
        assert channel.rank == rank // 2
        here, there, theirs = channel.rank, 1 - channel.rank, torch.zeros(7)
        plain = [dist.irecv(theirs, group=group, group_src=there)]
        plain.append(dist.isend(torch.ones(7), group=group, group_dst=there))
        channel.begin([number(there, here)])
        channel.send(number(here, there), [torch.full((3,), float(here))])
        assert channel.receive(number(there, here))[0].tolist() == [float(there)] * 3
        channel.release(number(there, here))
        channel.end()
        for work in plain:
            work.wait()
        assert theirs.sum() == 7


def _meshes(world: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "pp"))
    assert connect(CPU, group=mesh).size() == 3
    assert connect(CPU, group=world) is world
    with pytest.raises(ConfigError, match="'pp'"):
        connect(CPU, group=init_device_mesh("cpu", (3,), mesh_dim_names=("dp",)))


def _control_data(world: dist.ProcessGroup) -> None:
    """What the ranks tell each other lies on the host: it does not go over the devices' group."""
    store = dist.PrefixStore("control", world.get_group_store())
    make = partial(gloo_group, store, timedelta(seconds=1000))
    how = {"make": make, "make_control": make, "device": torch.device("meta"), "timeout_s": 1000.0}
    with watch_ranks(world) as watch:
        transport = DeviceTransport(world, watch, pairs=[], **how)
        transport._group = None
        channel = Channel(transport, watch, device=torch.device("meta"))
        told = torch.ones(2, dtype=torch.float64)
        channel.all_reduce(told)
        everybody = SumGroup("figures", tuple(range(channel.ranks)))
        channel.begin_sum(told, everybody).wait()
        assert told.tolist() == [channel.ranks**2] * 2


def fail_while_others_wait() -> None:
    """Rank 1 fails; rank 0 waits for a sum, and rank 2 is where no exception reaches it."""
    with channel_on(connect(CPU)) as channel:
        channel.all_gather_object(None)
        print("begun", flush=True)
        if channel.rank == 1:
            raise ValueError("boom")
        if channel.rank == 2:
            time.sleep(3600)
        with pytest.raises(PeerError, match=r'raise ValueError\("boom"\)'):
            channel.all_reduce(torch.ones(3))
        print("rank 0 knows why")
        channel.watch.check()


def killed_while_saving() -> None:
    """The last rank is killed when it has written its part: the others wait for it inside of a collective."""
    ranks, job = int(os.environ["WORLD_SIZE"]), two_linears()
    how = {"planner": "exact", "schedule": "1f1b", "microbatches": 2, "microbatch_size": 1}
    with Pipeline(job, plan(job, ranks=ranks, cluster=cpu_cluster(ranks), **how)) as pipeline:
        pipeline.step(job.batch(0, 2))
        if pipeline.rank == ranks - 1:
            files.checksums = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        pipeline.save(Path(os.environ["FOLDER"]))


def frozen() -> None:
    """One rank is frozen (its machine may be gone as well); the others wait for each other in a chain."""
    stopped, lost_s = int(os.environ["FROZEN"]), float(os.environ["LOST_S"])
    world = connect(CPU)
    with watch_ranks(world, lost_s=lost_s) as watch:
        channel = dist_channel(world, watch, device=CPU, timeout_s=1000.0)
        channel.all_gather_object(None)
        watch.status = f"{watch.rank}F0"
        if watch.rank == stopped:
            # Until all others know what it does, as they would in a run.
            until(lambda: all(s and s.doing == f"{r}F0" for r, s in enumerate(watch._board.statuses())))
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        source = (watch.rank + 1) % watch.ranks
        channel.begin([number(source, watch.rank)])
        channel.receive(number(source, watch.rank))


def wait() -> None:
    with channel_on(connect(CPU)) as channel:
        wanted = number(1 - channel.rank, channel.rank)
        channel.begin([wanted])
        channel.all_gather_object(None)
        if channel.rank == 0:
            print("begun", flush=True)
        channel.receive(wanted)


def deadlock() -> None:
    """Ranks 0 and 1 wait for each other, rank 2 for rank 0."""
    with watch_ranks(connect(CPU)) as watch:
        channel = dist_channel(connect(CPU), watch, device=CPU, timeout_s=2.0 if watch.rank == 0 else 1000.0)
        channel.all_gather_object(None)
        wanted = number([1, 0, 0][channel.rank], channel.rank)
        channel.begin([wanted])
        watch.status = f"{channel.rank}F0"
        if watch.rank == 0:
            until(lambda: all(state and state.waits_for for state in watch._board.statuses()[1:]))
        channel.receive(wanted)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
