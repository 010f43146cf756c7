"""What both trainers want of a pipeline."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeloom.integrations.as_one_process import load_optimizer_states


@pytest.mark.parametrize(
    ("group", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_counts_of_updates_are_where_the_optimizer_keeps_them(group: dict[str, Any], device: str) -> None:
    param = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([param])
    optimizer.param_groups[0].update(group)
    weights = SimpleNamespace(params={"w": param}, optimizers=[optimizer])
    pipe: Any = SimpleNamespace(weights=weights, captured=SimpleNamespace(graph=SimpleNamespace(rows={})))
    load_optimizer_states(pipe, {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}})
    assert optimizer.state[param]["step"].device.type == device
    assert optimizer.state[param]["exp_avg"].device.type == "meta"
