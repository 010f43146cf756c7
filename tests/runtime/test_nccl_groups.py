"""The groups that NCCL gets: their limits, and their end. torch.distributed's calls are stood in for, or gloo
makes the groups."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeloom.runtime.failure.noticeboard import local_boards
from pipeloom.runtime.failure.watch import Watch
from pipeloom.runtime.launch.connect import connect
from pipeloom.runtime.transports.gloo import GlooTransport
from pipeloom.runtime.transports.nccl import NcclTransport
from pipeloom.runtime.transports.transport import SumGroup

LIMIT_S = 20.0


class NotStarted(Exception):
    """Instead of torch.distributed."""


class Group(dist.ProcessGroup):
    """Of two ranks; notes its end."""

    def __init__(self, name: str, aborted: list[str]) -> None:
        super().__init__(0, 2)
        self.called = name
        self.aborted = aborted

    def abort(self) -> None:
        self.aborted.append(self.called)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `new_group` was "asked" for, and the groups that were "aborted"."""
    asked: list[dict[str, Any]] = []
    aborted: list[str] = []

    def new_group(ranks: list[int], **how: Any) -> Group:
        asked.append(how)
        return Group(f"{how['backend']} {len(asked)}", aborted)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return {"asked": asked, "aborted": aborted}


def transport(made: dict[str, Any]) -> NcclTransport:
    world = Group("world", made["aborted"])
    watch = Watch(local_boards(2)[0])
    found = NcclTransport(world, watch, device=torch.device("cpu"), timeout_s=LIMIT_S, pairs=())
    found.open_groups([SumGroup("tied", (0, 1))])
    found._lookout.close()
    return found


def test_our_own_limit_passes_first(made: dict[str, Any]) -> None:
    """NCCL's watchdog counts from when an operation is posted, and says less."""
    transport(made)
    limits = [how["timeout"] for how in made["asked"] if how["backend"] == "nccl"]
    assert len(limits) == 3 and min(limits) >= 3 * timedelta(seconds=LIMIT_S)


@pytest.mark.parametrize("launched", [False, True])
def test_so_does_it_for_all_ranks(monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    def init_process_group(backend: str, *, timeout: timedelta, **_: object) -> None:
        raise NotStarted(backend, timeout)

    module = import_module("pipeloom.runtime.launch.connect")  # the room has a function of this name
    monkeypatch.setattr(module, "_launcher_store", lambda _: dist.HashStore() if launched else None)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name, text in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(NotStarted) as caught:
        connect(torch.device("cuda", 1), timeout_s=LIMIT_S)
    backend, limit = caught.value.args
    assert backend == "nccl" and limit >= 3 * timedelta(seconds=LIMIT_S)


def test_a_failure_ends_sums_too(made: dict[str, Any]) -> None:
    found = transport(made)
    found._control.interrupt = lambda: None  # type: ignore[method-assign]  # over gloo: it has tests of its own
    found.interrupt()
    assert sorted(made["aborted"]) == ["nccl 1", "nccl 2", "nccl 4", "world"]


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """As a script has made it, of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def transports(world: dist.ProcessGroup) -> list[GlooTransport | NcclTransport]:
    """Of both kinds, with the groups that they open."""
    watch = Watch(local_boards(1)[0])
    made = [
        GlooTransport(world),
        NcclTransport(world, watch, device=torch.device("cpu"), timeout_s=LIMIT_S, pairs=(), backend="gloo"),
    ]
    for one in made:
        one.open_groups([SumGroup("tied", (0,))])
    return made


def group_names() -> list[str]:
    return sorted(dist.distributed_c10d._world.pg_names.values())


def test_closing_destroys_the_groups_that_were_opened_and_no_others(world: dist.ProcessGroup) -> None:
    dist.new_group([0])
    own = group_names()
    made = transports(world)
    assert len(group_names()) == len(own) + 5
    for one in [*made, *made]:
        one.close()
    assert group_names() == own


def test_groups_stay_where_their_end_would_let_a_name_come_back(world: dist.ProcessGroup) -> None:
    made = transports(world)
    dist.new_group([0], use_local_synchronization=True)
    open_names = group_names()
    for one in made:
        one.close()
    assert group_names() == open_names


def test_groups_stay_after_a_failure(world: dist.ProcessGroup) -> None:
    """To destroy one waits for its operations, and some may never end."""
    made = transports(world)
    open_names = group_names()
    for one in made:
        one.interrupt()
        one.close()
    assert group_names() == open_names


def test_a_script_may_have_ended_all_groups(world: dist.ProcessGroup) -> None:
    made = transports(world)
    dist.destroy_process_group()
    for one in made:
        one.close()
