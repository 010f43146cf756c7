"""What pipelines exchange on the stand-in, and who waits for whom there. Ranks are threads, each with a
device of its own."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import standin
import torch
import torch.distributed as dist
from exchanges import all_to_all, number, sums_and_objects
from processes import until
from standin.process_group import StandinGroup

from pipeloom.ir.errors import ConfigError
from pipeloom.runtime.board import Board
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.device_transport import DeviceTransport, device_group
from pipeloom.runtime.transport import gloo_group
from pipeloom.runtime.watch import Watch

LIMIT = timedelta(seconds=60)


def on_ranks(ranks: int, work: Callable[[Channel], Any], *, limits_s=(60.0,) * 3, bound=lambda _: None):
    """What `work` returns on each rank.  bound: the device that all groups of a rank are made for."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        torch.accelerator.set_device_index(rank)
        device = torch.device(standin.NAME, rank)

        def group(name: str, rank: int, ranks: int) -> StandinGroup:
            made = device_group(store, 60.0, device, name, rank, ranks)
            made.bound_device_id = bound(device)
            return made

        board = Board(dist.PrefixStore("board", store), rank, ranks, interval_s=0.05, lost_s=math.inf)
        with Watch(board) as watch:
            transport = DeviceTransport(
                group("world", rank, ranks),
                watch,
                make=group,
                make_control=partial(gloo_group, store, LIMIT, inside=True),
                device=device,
                timeout_s=limits_s[rank],
            )
            return work(Channel(transport, watch, device=device, timeout_s=limits_s[rank]))

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result(300) for future in [pool.submit(run, rank) for rank in range(ranks)]]


@pytest.mark.parametrize("with_device_id", [False, True])
def test_three_ranks_exchange_messages_and_sums(with_device_id: bool) -> None:
    """PyTorch makes communicators of pairs on demand, or one for each group that has a device_id."""

    def work(channel: Channel) -> None:
        device = torch.device(standin.NAME, channel.rank)
        all_to_all(channel, device)
        sums_and_objects(channel, device)

    on_ranks(3, work, bound=lambda device: device if with_device_id else None)


def test_a_group_for_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_id"):
        on_ranks(1, lambda channel: None, bound=lambda device: torch.device(standin.NAME, 1))


def test_a_device_that_does_not_come_to_its_transfer_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """As where what it is to do first stands behind a receive in a queue of the hardware."""
    gate = threading.Event()

    def work(channel: Channel) -> str | None:
        rank, watch = channel.rank, channel.watch
        wanted = number(1 - rank, rank)
        channel.begin([wanted])
        if rank == 0:
            standin.launch(torch.accelerator.current_stream(), "gate", gate.wait)
        channel.receive(wanted)
        failure = watch._board.wait_for_failure(300)
        gate.set()
        torch.accelerator.synchronize()
        watch.__exit__(None, None, None)
        return failure and failure.summary

    first, second = on_ranks(2, work, limits_s=(0.5, 1000.0))
    assert first == second and "for its device to come to 1SEND_F0>0" in str(first)
    capfd.readouterr()


def test_the_table_says_what_devices_wait_for(capfd: pytest.CaptureFixture[str]) -> None:
    """Hosts have gone on to their last action when their devices come to a halt."""
    all_wait = threading.Event()

    def work(channel: Channel) -> list[Any]:
        rank, watch = channel.rank, channel.watch
        wanted = number(1 - rank, rank)
        channel.begin([wanted])
        watch.status = f"{rank}F1"
        if rank == 0:  # its limit is short
            assert all_wait.wait(300)
        channel.receive(wanted)
        watch.status = f"{rank}STEP"
        if rank == 1:
            until(lambda: watch.device_waits() is not None)
            all_wait.set()
        torch.accelerator.synchronize()
        failure = watch._board.wait_for_failure(300)
        assert failure is not None
        watch.__exit__(None, None, None)
        return [failure.rank, failure.summary]

    found = on_ranks(2, work, limits_s=(0.5, 1000.0))
    assert found[0] == found[1] and found[0][0] == 0
    assert found[0][1].endswith("s for 1SEND_F0>0 from rank 1")
    table = capfd.readouterr().err
    assert "0     0F1   1SEND_F0>0 from rank 1, for" in table
    assert "1     1F1   0SEND_F0>1 from rank 0, for" in table
    assert "they wait for each other" in table
