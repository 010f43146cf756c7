"""Which device a rank takes, and what ranks tell each other before they train."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import plain_net
import pytest
import runs
import torch
import torch.distributed as dist
from refusals import refused

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import CommunicationError, ConfigError, PlanError
from pipeloom.ranks import rank_device, result_of_rank_0
from pipeloom.runtime.channel import Channel

JOB = plain_net.two_linears()


class Enough(Exception):
    """So far the test goes."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch.cuda, which pretends to have four devices, and torch.distributed are asked for."""
    calls: list[str] = []

    def meet(backend: str, **_: object) -> None:
        calls.append(f"init_process_group {backend}")
        raise Enough

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"set_device {device}"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: calls.append("current_device") or 0)
    monkeypatch.setattr(dist, "init_process_group", meet)
    ranks = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, text in ranks.items():
        monkeypatch.setenv(name, text)
    return calls


@pytest.mark.parametrize(("named", "device"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1")])
def test_a_rank_takes_its_device_before_it_meets_the_others(asked, named, device):
    with pytest.raises(Enough):
        Pipeline(JOB, runs.even_plan(JOB, 2, microbatches=2), options=Options(device=named))
    assert asked == [f"set_device {device}", "init_process_group nccl"]


def test_without_a_launcher_the_current_device_stays_and_too_many_ranks_are_refused(asked, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "4")
    assert "4 devices" in refused(ConfigError, rank_device, Options(device="cuda"))
    assert asked == []
    monkeypatch.delenv("LOCAL_RANK")
    assert rank_device(Options(device="cuda")) == torch.device("cuda", 0)
    assert rank_device(Options()) == torch.device("cpu")


def test_different_plans_are_refused_on_all_ranks_before_anything_is_built() -> None:
    plans = [runs.even_plan(JOB, 2, microbatches=count) for count in (2, 3)]

    def rank(index: int, channel: Channel) -> str:
        return refused(PlanError, Pipeline, JOB, plans[index], channel=channel)

    assert all("rank 1 has another plan" in said for said in runs.threads(2, rank))


def group_of(store: Any) -> Callable[[int], Any]:
    """Makes a rank's group: only its store is real."""
    return lambda rank: SimpleNamespace(rank=lambda: rank, get_group_store=lambda: store, group_name="all")


def test_the_others_begin_nothing_that_has_a_limit_before_rank_0_is_through(monkeypatch):
    """A broadcast that they began at once would end them where planning takes longer than its limit."""
    store, order, waiting = dist.HashStore(), [], threading.Event()

    def check(keys: list[str]) -> bool:
        waiting.set()
        return store.check(keys)

    def broadcast(message: list[Any], group_src: int, group: Any) -> None:
        order.append(f"rank {group.rank()} broadcasts")
        waiting.set()

    def plan() -> str:
        assert waiting.wait(300)
        order.append("planned")
        return "plan"

    group = group_of(SimpleNamespace(check=check, add=store.add, set=store.set, get=store.get))
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
    other = threading.Thread(target=result_of_rank_0, args=(group(1), plan))
    other.start()
    assert result_of_rank_0(group(0), plan) == "plan"
    other.join(300)
    assert order[0] == "planned" and len(order) == 3


def test_the_others_wait_no_longer_when_rank_0_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an error that it cannot hand on, such as one of the job's file."""
    group = group_of(dist.HashStore())
    monkeypatch.setattr("pipeloom.ranks.time.sleep", lambda _: pytest.fail("waits for ever"))

    def plan() -> str:
        raise KeyError("width")

    with pytest.raises(KeyError):
        result_of_rank_0(group(0), plan)
    assert "KeyError" in refused(CommunicationError, result_of_rank_0, group(1), plan)
