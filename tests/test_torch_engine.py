"""Our cut and order on the engine of torch.distributed.pipelining give what one process gives: four processes
are started once, and asked for every order, plain, with each stage sharded (traced by torch.fx and by
torch.export), and with tensor parallelism."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import processes
import pytest
import torch.distributed as dist
import torch_net
from refusals import refused
from torch import Tensor, nn
from torch_net import Tower

from pipeloom import Plan, plan, torch_stages
from pipeloom.ir.errors import CaptureError, ConfigError, PlanError
from pipeloom.planner.planners import PLANNERS, JointPlanner

CARDS = "2 x a100-40"
ORDERS = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "searched")


def planned(name: str) -> Plan:
    settings = {"microbatches": torch_net.MICROBATCHES, "microbatch_size": torch_net.ROWS, "cluster": CARDS}
    if name != "searched":
        return plan(torch_net.job(), granularity="module", schedule=name, **settings)
    few = JointPlanner(schedules=lambda _: ("1f1b", "gpipe"), axes=("cuts",), planners=("exact",))
    with patch.dict(PLANNERS, auto=replace(PLANNERS["auto"], plan=few)):
        return plan(torch_net.job(), granularity="module", planner="auto", **settings)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, dict[str, float]], str]]:
    folder = tmp_path_factory.mktemp("torch_engine")
    for name in ORDERS:
        made = planned(name)
        assert made.schedule == name
        made.save(folder / f"{name}.json")
    ranks = processes.start_ranks(4, torch_net.__file__, folder)
    ends = processes.ends_of(*ranks)
    assert [code for code, _, _ in ends] == [0] * 4, ends
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("way", torch_net.WAYS)
@pytest.mark.parametrize("name", ORDERS)
def test_loss_and_gradients_are_those_of_one_process(name: str, way: str, answers: Any) -> None:
    ranks = [found[f"{name}, {way}"] for found, _ in answers]
    assert max(rank["gradients"] for rank in ranks) < 1e-12
    losses = [rank["loss"] for rank in ranks if "loss" in rank]
    assert len(losses) == 2 and max(losses) < 1e-12
    parameters = len(list(torch_net.Net().parameters()))
    assert ranks[0]["missing"] + ranks[2]["missing"] == parameters  # each is in one stage


@pytest.mark.slow
def test_a_layer_sharded_by_itself_is_refused_with_split_backwards(answers: Any) -> None:
    assert all("sharded" in said for _, said in answers)


def two_stages(model: Callable[[], nn.Module], **settings: Any) -> Plan:
    """A plan of another model for two ranks."""
    how = {"microbatches": 4, "microbatch_size": 2, "cluster": CARDS, "granularity": "module"}
    return plan(torch_net.tower_job(model), **how | settings)


class Deciding(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else super().forward(x)


@pytest.mark.parametrize(
    ("how", "settings", "model", "error", "word"),
    [
        ({"skips": True}, {"cluster": "3 x a100-40"}, None, PlanError, "sends a to stage 2"),
        ({"tied": True}, {}, None, PlanError, "a.weight"),
        ({}, {}, Deciding, CaptureError, "Deciding"),
        ({}, {}, nn.Identity, PlanError, "does not call module"),
        ({}, {"weights": "2bw"}, None, PlanError, "2bw"),
    ],
)
def test_what_the_engine_lacks_is_refused(how, settings, model, error, word):
    planned_for = partial(Tower, **how)
    given = two_stages(planned_for, **settings), (model or planned_for)(), 0
    assert word in refused(error, torch_stages, *given)


def test_plans_without_whole_modules_and_groups_of_another_size_are_refused(tmp_path: Path) -> None:
    made = two_stages(Tower)
    assert "modules" in refused(PlanError, torch_stages, replace(made, modules={}), Tower(), 0)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert "group of 1" in refused(ConfigError, torch_stages, made, Tower(), 0)
    finally:
        dist.destroy_process_group()
