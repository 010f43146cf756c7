"""The groups that NCCL gets: their limits, and their end. torch.distributed's calls are stood in for, or gloo
makes the groups."""

import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from boards import local_boards

from pipeloom.ir.errors import CommunicationError
from pipeloom.runtime.channel import Channel, meeting, run_threads
from pipeloom.runtime.connect import connect
from pipeloom.runtime.device_transport import DeviceTransport, device_group
from pipeloom.runtime.transport import SumGroup
from pipeloom.runtime.watch import Watch

LIMIT_S = 20.0


def test_our_own_limit_passes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog counts from when an operation is posted, and says less."""
    made = Mock()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    made.Options = SimpleNamespace
    device_group(dist.HashStore(), LIMIT_S, torch.device("cuda"), "tied", 0, 2)
    assert made.call_args.args[-1]._timeout >= 3 * timedelta(seconds=LIMIT_S)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, text in meeting.items():
        monkeypatch.setenv(name, text)


def test_a_rank_that_meets_nobody_says_where_and_how_long_it_waited(two_ranks: None) -> None:
    with pytest.raises(CommunicationError, match=r"rank 0 .* all 2 ranks at 127.0.0.1:0 in"):
        connect(torch.device("cpu"), timeout_s=1.0)


def test_so_does_it_for_all_ranks(monkeypatch: pytest.MonkeyPatch, two_ranks: None) -> None:
    started = Mock(side_effect=NotImplementedError)
    monkeypatch.setattr(dist, "init_process_group", started)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    with pytest.raises(NotImplementedError):
        connect(torch.device("cuda", 1), timeout_s=LIMIT_S)
    assert started.call_args.args == ("nccl",)
    assert started.call_args.kwargs["timeout"] >= 3 * timedelta(seconds=LIMIT_S)


@pytest.mark.parametrize("fails", [True, False])
def test_a_failure_aborts_all_groups_and_an_end_shuts_down_those_that_were_made(fails: bool) -> None:
    """After a failure no group waits for its operations: some may never end."""
    ended: list[str] = []

    def make(name: str, *_: int) -> Mock:
        group = Mock(**{"rank.return_value": 0, "size.return_value": 2, "bound_device_id": None})
        for how in ("abort", "shutdown"):
            getattr(group, how).side_effect = partial(ended.append, f"{how} {name}")
        return group

    made = DeviceTransport(
        make("world"),
        Watch(local_boards(2)[0]),
        make=make,
        make_control=make,
        device=torch.device("cpu"),
        timeout_s=LIMIT_S,
        pairs=[(0, 1), (1, 0)],
    )
    made.open_groups([SumGroup("tied", (0, 1))])
    made._lookout.close()
    if fails:
        made._control.interrupt = lambda: None  # it has tests of its own
        made.interrupt()
        for thread in (t for t in threading.enumerate() if t.name == "pipeloom-abort"):
            thread.join()
    made.close()
    made.close()
    theirs = ["messages 0 to 1", "messages 1 to 0", "tied (0, 1)"]
    how, names = ("abort", [*theirs, "world"]) if fails else ("shutdown", theirs)
    assert sorted(ended) == [f"{how} {name}" for name in names]


def open_sockets() -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(link.is_symlink() and str(link.readlink()).startswith("socket") for link in links)


def test_groups_of_threads_leave_nothing_open() -> None:
    before = open_sockets()

    def rank(_: int, channel: Channel) -> None:
        with channel.watch:
            channel.open_groups([meeting((0, 1))])
            if channel.rank < 2:
                channel.all_reduce(torch.ones(1), (0, 1))
            channel.all_reduce(torch.ones(1))

    run_threads(3, rank)
    assert open_sockets() == before
