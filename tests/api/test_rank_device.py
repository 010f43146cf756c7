"""Which device a rank takes, with torch.cuda pretended: four devices, and a note of who asks for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plain_net
import pytest
import runs
import torch
import torch.distributed as dist

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import ConfigError
from pipeloom.rank_stages import RankStages, StageVariants
from pipeloom.ranks import rank_device
from pipeloom.runtime.channel import local_channels

JOB = plain_net.two_linears()


class Enough(Exception):
    """So far the test goes."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def noted(name: str, result: Callable[[], Any]) -> Callable[..., Any]:
        def call(*given: object, **_: object) -> Any:
            calls.append(" ".join(map(str, (name, *given))))
            return result()

        return call

    def stop() -> None:
        raise Enough

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", noted("set_device", lambda: None))
    monkeypatch.setattr(torch.cuda, "current_device", noted("current_device", lambda: 0))
    monkeypatch.setattr(dist, "init_process_group", noted("init_process_group", stop))
    ranks = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, text in ranks.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("PIPELOOM_LAUNCHER_STORE", raising=False)
    return calls


@pytest.mark.parametrize(("named", "device"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1")])
def test_a_rank_takes_its_device_before_it_meets_the_others(
    asked: list[str], named: str, device: str
) -> None:
    with pytest.raises(Enough):
        Pipeline(JOB, runs.even_plan(JOB, 2, microbatches=2), options=Options(device=named))
    assert asked == [f"set_device {device}", "init_process_group nccl"]


def test_without_a_launcher_the_current_device_stays(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK")
    assert rank_device(Options(device="cuda")) == torch.device("cuda", 0)
    assert rank_device(Options()) == torch.device("cpu")


def test_more_ranks_on_a_node_than_devices_are_refused(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ConfigError, match="4 devices"):
        rank_device(Options(device="cuda"))
    assert asked == []


def test_weights_and_stages_go_to_the_device_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs no driver. Without its number they would go to whichever is current."""
    device, used = torch.device("meta", 3), []

    def stage_functions(*_: object, device: str, **how: object) -> str:
        used.append(device)
        return "made"

    monkeypatch.setattr("pipeloom.rank_stages.stage_functions", stage_functions)
    plan = runs.even_plan(JOB, 1, microbatches=2)
    captured = runs.capture_of(JOB)
    rank = RankStages(
        job=JOB,
        plan=plan,
        captured=captured,
        stages=plan.stage_graph(captured.graph),
        indices=(0,),
        options=Options(),
        device=device,
        channel=local_channels(1)[0],
    )
    training = StageVariants(rank)
    training.variant(JOB.batch(0, 1))
    StageVariants(rank, training).variant(JOB.batch(0, 2))
    assert used == ["meta:3"] * 3
