"""Checkpoints of several ranks: saved under one plan and loaded under another, and errors on all ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeloom.runtime.checkpoint import checkpoint
from pipeloom.runtime.checkpoint.state import TrainState

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """(folder, what each of the three ranks printed)."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        printed = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    return folder, [json.loads(text) for text in printed]


def test_two_stages_saved_load_as_three_and_train_on_identically(ran: tuple[Path, list[dict]]) -> None:
    for rank in ran[1]:
        assert (rank["step"], rank["extra"], rank["same"]) == (2, {"from": 0}, True)
        assert rank["buffer"] == [1.0, 1.0]


def test_one_process_loads_what_two_ranks_saved(ran: tuple[Path, list[dict]]) -> None:
    parameters = {"embed": nn.Parameter(torch.zeros(6, 4))}
    parameters |= {name: nn.Parameter(torch.zeros(4, 4)) for name in "abcd"}
    optimizer = torch.optim.AdamW(parameters.values())
    state = TrainState(parameters=parameters, buffers={"mean": torch.zeros(2)}, optimizers=(optimizer,))
    assert checkpoint.load(ran[0] / "two", state, group=None) == (2, {"from": 0})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(optimizer.state[p]["step"] == 2 and p.abs().sum() > 0 for p in parameters.values())


def test_a_tied_parameter_is_written_once_by_the_lowest_rank(ran: tuple[Path, list[dict]]) -> None:
    index = json.loads((ran[0] / "two" / "step-00000002" / "index.json").read_text())
    assert index["aliases"] == {"head": "embed"}
    assert sorted(index["files"]) == ["__0_0.distcp", "__1_0.distcp", "tensors.json"]
    sizes = {name: size for name, (size, _) in index["files"].items()}
    # Rank 0 writes embed, a, b and the buffer; rank 1 only c and d.
    assert sizes["__0_0.distcp"] > sizes["__1_0.distcp"]


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("mismatch", "b is [5, 4] float32, the checkpoint has [4, 4] float32"),
        ("unsaved", "optimizer state 'history' of d is a list"),
        ("missing", "checkpoint directory {folder}/none does not exist"),
        ("sight", "rank 0 finds step-00000002 and rank 1 finds step-00000004"),
        ("damage", "is corrupt: the bytes of __1_0.distcp have changed since it was saved"),
    ],
)
def test_every_rank_gets_the_error(ran: tuple[Path, list[dict]], trouble: str, message: str) -> None:
    folder, ranks = ran
    for rank in ranks:
        assert message.format(folder=folder) in rank[trouble]
    culprit = {"mismatch": 1, "unsaved": 2}
    if trouble in culprit:
        told = [f"(rank {culprit[trouble]})" in rank[trouble] for rank in ranks]
        assert told == [number != culprit[trouble] for number in range(3)]
