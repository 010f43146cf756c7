"""Damaged checkpoints are refused in a short sentence."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeloom.ir.errors import CheckpointError
from pipeloom.runtime.checkpoint import checkpoint
from pipeloom.runtime.checkpoint.state import TrainState


def state() -> TrainState:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainState(parameters=dict(layer.named_parameters()), optimizers=(optimizer,))


def test_it_is_said_in_a_sentence(tmp_path: Path) -> None:
    """Damaged checkpoints: a table that has lost an entry of the optimizer ended in torch's own KeyError,
    a dtype that is a thousand digits long in a message as long."""
    checkpoint.save(tmp_path, state(), step=1, extra={}, group=None)
    table, index = (tmp_path / "step-00000001" / name for name in ("tensors.json", "index.json"))
    entries = json.loads(table.read_text())
    del entries["optimizer.weight.step"]
    table.write_text(json.dumps(entries))
    plain, content = json.loads(index.read_text()), table.read_bytes()
    plain["files"][table.name] = [len(content), zlib.crc32(content)]
    index.write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match="AdamW cannot take its state from the checkpoint: KeyError"):
        checkpoint.load(tmp_path, state(), group=None)


def test_a_long_word_does_not_fill_the_message(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(), step=1, extra={}, group=None)
    index = tmp_path / "step-00000001" / "index.json"
    plain = json.loads(index.read_text())
    plain["model"]["bias"][1] = 5000 * "9"
    index.write_text(json.dumps(plain))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, state(), group=None)
    assert len(str(caught.value)) < 1000
