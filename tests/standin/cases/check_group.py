"""The process group orders transfers as NCCL does. Ranks are threads, each with a device of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from standin.process_group import BACKEND, StandinGroup
from torch import Tensor

LIMIT_S = 60.0


def on_ranks(work: Callable[[int, Callable[[str], StandinGroup]], Any]) -> list[Any]:
    """What `work` returns on each of two ranks. It gets its rank, and what makes a group of that name."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        torch.accelerator.set_device_index(rank)

        def group(name: str) -> StandinGroup:
            return StandinGroup(dist.PrefixStore(name, store), rank, 2, timedelta(seconds=LIMIT_S))

        return work(rank, group)

    with ThreadPoolExecutor(2) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(run, rank) for rank in range(2)]]


def tensor(rank: int, *values: float) -> Tensor:
    return torch.tensor(values, device=f"standin:{rank}")


def test_a_wait_holds_up_the_stream_and_not_the_host() -> None:
    received, waited = threading.Event(), threading.Event()

    def work(rank: int, group: Callable[[str], StandinGroup]) -> None:
        lane = group("lane")
        if rank == 0:
            transfer = lane.send([tensor(0, 1.0)], 1, 0)
            transfer.wait()
            assert not transfer.is_completed()
            waited.set()
        else:
            lane._pair(0, torch.device("standin", 1))  # made before, as both hosts wait for it
            assert waited.wait(LIMIT_S)
            lane.recv([torch.empty(1, device="standin:1")], 0, 0).wait()
        torch.accelerator.synchronize()
        received.set()

    on_ranks(work)
    assert received.is_set()


def test_both_directions_in_one_lane_are_stuck_until_an_abort() -> None:
    posted = threading.Barrier(2)

    def work(rank: int, group: Callable[[str], StandinGroup]) -> None:
        lane, peer = group("lane"), 1 - rank  # first it receives, as what is posted ahead
        works = [lane.recv([tensor(rank, 0.0)], peer, 0), lane.send([tensor(rank, 1.0)], peer, 0)]
        posted.wait(LIMIT_S)
        assert not any(one.is_completed() for one in works)
        posted.wait(LIMIT_S)
        if rank == 0:
            lane.abort()
        torch.accelerator.synchronize()
        assert all(one.is_completed() and not one.is_success() for one in works)
        with pytest.raises(RuntimeError, match="aborted"):
            works[0].wait()
        if rank == 0:
            with pytest.raises(RuntimeError, match="aborted"):
                lane.send([tensor(0, 1.0)], 1, 0)

    on_ranks(work)


def test_a_group_bound_to_a_device_has_one_stream_for_all() -> None:
    def work(rank: int, group: Callable[[str], StandinGroup]) -> bool:
        bound, free = group("bound"), group("free")
        bound.bound_device_id = torch.device("standin", rank)
        shared = [made._pair(1 - rank, torch.device("standin", rank)) for made in (bound, free)]
        everyone = [made._all(torch.device("standin", rank)) for made in (bound, free)]
        return shared[0] is everyone[0] and shared[1] is not everyone[1]

    assert on_ranks(work) == [True, True]


def test_torch_finds_the_backend() -> None:
    assert dist.get_default_backend_for_device("standin") == BACKEND
