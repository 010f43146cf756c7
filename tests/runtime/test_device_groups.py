"""The groups that NCCL gets: their limits, and their end. torch.distributed's calls are stood in for, or gloo
makes the groups."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from boards import local_boards

from pipeloom.runtime.channel import Channel, meeting, run_threads
from pipeloom.runtime.connect import connect
from pipeloom.runtime.device_transport import DeviceTransport, device_group
from pipeloom.runtime.transport import SumGroup
from pipeloom.runtime.watch import Watch

LIMIT_S = 20.0


class NotStarted(Exception):
    """Instead of torch.distributed."""


class Group(dist.ProcessGroup):
    """Of two ranks; notes its end, and sends nothing."""

    def __init__(self, name: str, aborted: list[str]) -> None:
        super().__init__(0, 2)
        self.called = name
        self.aborted = aborted

    def abort(self) -> None:
        self.aborted.append(self.called)

    def send(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    recv = send


def transport(aborted: list[str]) -> DeviceTransport:
    def make(name: str, rank: int, ranks: int) -> Group:
        return Group(name, aborted)

    watch = Watch(local_boards(2)[0])
    made = DeviceTransport(
        Group("world", aborted),
        watch,
        make=make,
        make_control=make,
        device=torch.device("cpu"),
        timeout_s=LIMIT_S,
        pairs=[(0, 1), (1, 0)],
    )
    made.open_groups([SumGroup("tied", (0, 1))])
    made._lookout.close()
    return made


def test_our_own_limit_passes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog counts from when an operation is posted, and says less."""
    limits: list[timedelta] = []

    class Made:
        Options = SimpleNamespace

        def __init__(self, store: dist.Store, rank: int, ranks: int, options: SimpleNamespace) -> None:
            limits.append(options._timeout)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Made, raising=False)
    device_group(dist.HashStore(), LIMIT_S, torch.device("cuda"), "tied", 0, 2)
    assert min(limits) >= 3 * timedelta(seconds=LIMIT_S)


@pytest.mark.parametrize("launched", [False, True])
def test_so_does_it_for_all_ranks(monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    def init_process_group(backend: str, *, timeout: timedelta, **_: object) -> None:
        raise NotStarted(backend, timeout)

    module = import_module("pipeloom.runtime.connect")  # the room has a function of this name
    monkeypatch.setattr(module, "TCPStore", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(module, "LAUNCHER_STORE", "RANK" if launched else "no such variable")
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name, text in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(NotStarted) as caught:
        connect(torch.device("cuda", 1), timeout_s=LIMIT_S)
    backend, limit = caught.value.args
    assert backend == "nccl" and limit >= 3 * timedelta(seconds=LIMIT_S)


def test_a_failure_ends_sums_too() -> None:
    """And no group waits for its operations then: some may never end."""
    aborted: list[str] = []
    made = transport(aborted)
    made._control.interrupt = lambda: None  # type: ignore[method-assign]  # over gloo: it has tests of its own
    made.interrupt()
    made.close()
    assert sorted(aborted) == ["messages 0 to 1", "messages 1 to 0", "tied (0, 1)", "world"]


def test_closing_shuts_down_the_groups_that_were_made_and_no_others() -> None:
    ended: list[str] = []
    made = transport([])
    for group in (made._group, *made._edges.values(), *made._open.values()):
        group.shutdown = lambda name=group.called: ended.append(name)
    made.close()
    made.close()
    assert sorted(ended) == ["messages 0 to 1", "messages 1 to 0", "tied (0, 1)"]


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
