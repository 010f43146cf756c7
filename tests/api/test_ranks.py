"""What ranks tell each other before they train. Different plans: they stop before they build anything."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch.distributed as dist
import zoo

from pipeloom import Pipeline
from pipeloom.ir.errors import CommunicationError, PlanError
from pipeloom.ranks import result_of_rank_0
from pipeloom.runtime.channel import Channel

GATHER = """
import gc
import torch.distributed as dist
from pipeloom.runtime.connect import watch_ranks
dist.init_process_group("gloo")
with watch_ranks(dist.group.WORLD) as watch:
    texts = [watch.gather(f"{time}-{dist.get_rank()}", 300.0) for time in ("first", "second")]
assert texts == [["first-0", "first-1"], ["second-0", "second-1"]], texts
dist.barrier()
dist.destroy_process_group()
gc.collect()
"""


def test_different_plans_are_refused_on_all_ranks() -> None:
    job = zoo.job("gpt")
    plans = [runs.even_plan(job, 2, microbatches=count) for count in (2, 3)]

    def rank(index: int, channel: Channel) -> str:
        with pytest.raises(PlanError, match="rank 1 has another plan"):
            Pipeline(job, plans[index], channel=channel)
        return "refused"

    assert runs.threads(2, rank) == ["refused", "refused"]


def test_the_others_begin_nothing_that_has_a_limit_before_rank_0_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broadcast that they began at once would end them where planning takes longer than its limit."""
    store, order, waiting = dist.HashStore(), [], threading.Event()

    def group(rank: int) -> Any:
        def check(keys: list[str]) -> bool:
            waiting.set()
            return store.check(keys)

        seen = SimpleNamespace(check=check, add=store.add, set=store.set, get=store.get)
        return SimpleNamespace(rank=lambda: rank, get_group_store=lambda: seen, group_name="all")

    def broadcast(message: list[Any], src: int, group: Any) -> None:
        order.append(f"rank {group.rank()} broadcasts")
        waiting.set()

    def plan() -> str:
        assert waiting.wait(300)
        order.append("planned")
        return "plan"

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
    other = threading.Thread(target=result_of_rank_0, args=(group(1), plan))
    other.start()
    assert result_of_rank_0(group(0), plan) == "plan"
    other.join(300)
    assert order[0] == "planned" and len(order) == 3


def test_the_others_wait_no_longer_when_rank_0_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an error that it cannot hand on, such as one of the job's file."""
    store = dist.HashStore()
    monkeypatch.setattr("pipeloom.ranks.time.sleep", lambda _: pytest.fail("waits for ever"))

    def group(rank: int) -> Any:
        return SimpleNamespace(rank=lambda: rank, get_group_store=lambda: store, group_name="all")

    def plan() -> str:
        raise KeyError("width")

    with pytest.raises(KeyError):
        result_of_rank_0(group(0), plan)
    with pytest.raises(CommunicationError, match="KeyError"):
        result_of_rank_0(group(1), plan)


@pytest.mark.slow
def test_processes_tell_each_other_texts() -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    done = subprocess.run(
        [sys.executable, *command, sys.executable, "-c", GATHER], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
