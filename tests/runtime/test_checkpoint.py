"""Checkpoints: round trips, crashes at every moment, damage, mismatches, several ranks, export."""

import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import refusals
import torch
from processes import output
from runs import threads
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from pipeloom.ir.errors import CheckpointError
from pipeloom.runtime import checkpoint
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.checkpoint import TrainState
from pipeloom.runtime.checkpoint_directory import complete, newest

refused = partial(refusals.refused, CheckpointError)


def make_model(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> TrainState:
    return TrainState(
        parameters=dict(model.named_parameters()), buffers=dict(model.named_buffers()), optimizers=optimizers
    )


def with_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer]) -> TrainState:
    model = make_model()
    return state_of(model, make(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(directory: Path, state: TrainState, step: int = 1, **extra: object) -> Path:
    return checkpoint.save(directory, state, step=step, extra=extra)


@pytest.mark.parametrize("make_optimizer", [adamw, momentum, lambda m: torch.optim.Adagrad(m.parameters())])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, make_optimizer) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(3))
    extra = {"data": {"position": 3}, "rates": [0.1, float("inf")], "none": None}
    save(tmp_path, state_of(model, optimizer), step=3, **extra)
    expected = train(model, optimizer, range(3, 6))

    other = make_model(seed=1)
    fresh = make_optimizer(other)
    step, found = checkpoint.load(tmp_path, state_of(other, fresh))
    assert (step, found) == (3, extra)
    assert train(other, fresh, range(3, 6)) == expected
    for mine, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_hyper_parameters_come_back_per_parameter(tmp_path: Path) -> None:
    def grouped(model: nn.Module, decay: float) -> torch.optim.Optimizer:
        wide, narrow = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
        return torch.optim.AdamW([{"params": wide, "weight_decay": decay}, {"params": narrow}], lr=1.0)

    model = make_model()
    optimizer = grouped(model, 0.3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    save(tmp_path, state_of(model, optimizer))
    fresh = grouped(model, 0.0)
    checkpoint.load(tmp_path, state_of(model, fresh))
    for group, decayed in zip(fresh.param_groups, (0.3, 0.01), strict=True):
        assert (group["weight_decay"], group["lr"], group["initial_lr"]) == (decayed, 0.5, 1.0)
        assert group["betas"] == (0.9, 0.999)
    assert "weight_decay 0.3 and 0.01" in refused(checkpoint.load, tmp_path, with_optimizer(adamw))


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """In dtypes that are not its parameters', plain, or nested: SOAP keeps a list of matrices, one for each
    dimension of a parameter, and [] for a long one. A learning rate that is a tensor stays one."""
    model = make_model().bfloat16()
    optimizer, odd = momentum(model), 1 + 2**-20
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.25)
    kept = {"average": torch.full((8, 4), odd), "steps": torch.tensor(3), "count": 7}
    kept |= {"bases": [torch.full((4, 4), odd), []], "seen": ({"steps": 3, "mean": torch.ones(2)}, None)}
    optimizer.state[model[0].weight] = kept
    save(tmp_path, state_of(model, optimizer))
    fresh = momentum(model)
    fresh.param_groups[0]["lr"] = torch.tensor(9.0)
    checkpoint.load(tmp_path, state_of(model, fresh))
    torch.testing.assert_close(dict(fresh.state[model[0].weight]), kept, rtol=0, atol=0)
    assert torch.equal(fresh.param_groups[0]["lr"], rate)


def test_the_newest_is_loaded_and_old_ones_go(tmp_path: Path) -> None:
    model = make_model()
    for step in (1, 2, 10, 3):
        save(tmp_path, state_of(model), step=step)
    # Step 10 belongs to a run that somebody went back from: it is not touched, and no longer the newest.
    assert [p.name for p in complete(tmp_path)] == ["step-00000002", "step-00000003", "step-00000010"]
    assert checkpoint.load(tmp_path, state_of(model))[0] == 3
    assert checkpoint.load(tmp_path / "step-00000010", state_of(model))[0] == 10
    (tmp_path / "latest").unlink()
    assert newest(tmp_path).name == "step-00000010"


CRASH = """
import os, signal, shutil, sys, pathlib, torch
from torch import nn
from pipeloom.runtime import checkpoint
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.checkpoint import TrainState

folder, first, second = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def save(step):
    parameters = {"w": nn.Parameter(torch.full((1000,), float(step)))}
    optimizer = torch.optim.SGD(parameters.values())
    state = TrainState(parameters=parameters, optimizers=(optimizer,))
    checkpoint.save(folder, state, step=min(step, second), extra={"value": step}, keep=1)

def deadly(calls, function):
    "SIGKILL instead of the n-th system call that changes the disk."
    def call(*args, **kwargs):
        calls[0] -= 1
        if calls[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

changes = [(os, "fsync"), (pathlib.Path, "replace"), (pathlib.Path, "mkdir"), (shutil, "rmtree")]
save(first)
for moment in range(100):
    child = os.fork()
    if child == 0:
        left = [moment]
        for owner, name in changes:
            setattr(owner, name, deadly(left, getattr(owner, name)))
        save(second if second > first else second + 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    found = {"w": nn.Parameter(torch.zeros(1000))}
    step, extra = checkpoint.load(folder, TrainState(parameters=found))
    assert bool((found["w"] == extra["value"]).all()), (moment, step, extra)
    print(extra["value"], code, flush=True)
    if status == 0:
        break
"""


@pytest.mark.parametrize(
    ("first", "second"), [(1, 2), pytest.param(1, 1, id="same step again", marks=pytest.mark.slow)]
)
def test_a_crash_at_any_moment_loses_nothing(tmp_path: Path, first: int, second: int) -> None:
    """kill -9 at each place in turn where a save touches the disk; what is there always loads."""
    lines = output("-c", CRASH, tmp_path, first, second).splitlines()
    *killed, last = [tuple(map(int, line.split())) for line in lines]
    assert len(killed) > 7 and {code for _, code in killed} == {-signal.SIGKILL}
    assert killed[0][0] == first and last == (2, 0)
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.old"))


def test_a_full_disk_is_one_sentence_and_keeps_the_previous(tmp_path: Path) -> None:
    state = TrainState(parameters={"w": nn.Parameter(torch.ones(100_000))})
    save(tmp_path, state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        said = refused(save, tmp_path, state, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-00000002" in said and "disk full" in said
    assert checkpoint.load(tmp_path, state)[0] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000001"}


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def other_schema(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 99}))


@pytest.mark.parametrize(
    ("name", "harm", "word"),
    [
        ("rank-0.safetensors", cut_short, "corrupt"),
        ("rank-0.safetensors", flip_a_bit, "corrupt"),
        ("rank-0.safetensors", Path.unlink, "incomplete"),
        ("index.json", cut_short, "corrupt"),
        ("index.json", other_schema, "schema 99"),
    ],
)
def test_damage_is_named_and_nothing_is_overwritten(tmp_path, name, harm, word) -> None:
    state = state_of(make_model())
    path = save(tmp_path, state)
    harm(path / name)
    before = {name: tensor.clone() for name, tensor in state.model.items()}
    said = refused(checkpoint.load, tmp_path, state)
    assert word in said and str(path) in said
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.model.items())


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (lambda: state_of(nn.Sequential(*make_model(), nn.Linear(1, 1))), "no tensor 3.weight"),
        (lambda: state_of(make_model()[:1]), "1.bias and 6 more"),
        (lambda: state_of(make_model(width=9)), "[8, 4] float32"),
        (lambda: state_of(make_model().double()), "[8, 4] float64"),
        (lambda: with_optimizer(adamw), "SGD"),
    ],
)
def test_another_model_or_optimizer_is_refused(tmp_path, other, word) -> None:
    assert "does not exist" in refused(checkpoint.load, tmp_path / "nowhere", other())
    assert "no complete checkpoint" in refused(checkpoint.load, tmp_path, other())
    save(tmp_path, with_optimizer(momentum))
    assert word in refused(checkpoint.load, tmp_path, other())
    save(tmp_path, state_of(make_model()))
    assert "no optimizer" in refused(checkpoint.load, tmp_path, with_optimizer(adamw))


def test_loaded_state_is_laid_out_as_its_parameter(tmp_path: Path) -> None:
    """Fused kernels go by memory."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    optimizer, fresh = adamw(model), adamw(model)
    optimizer.zero_grad()
    model(torch.randn(2, 3, 4, 4)).square().mean().backward()
    optimizer.step()
    save(tmp_path, state_of(model, optimizer))
    checkpoint.load(tmp_path, state_of(model, fresh))
    state = fresh.state[model[0].weight]
    assert state["exp_avg"].stride() == model[0].weight.stride() != (27, 9, 3, 1)


def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    model = make_model()
    assert "extra cannot" in refused(save, tmp_path, state_of(model), seed=torch.zeros(1))
    optimizer = adamw(model)
    optimizer.state[model[0].weight]["history"] = [torch.zeros(1), object()]
    assert "'history' of 0.weight" in refused(save, tmp_path, state_of(model, optimizer))
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2, 3))])
    assert "[2, 3]" in refused(save, tmp_path, state_of(model, stranger))
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused(save, tmp_path / "file" / "inside", state_of(model))


def test_numbers_of_every_kind_and_layout_come_back(tmp_path: Path) -> None:
    whole = torch.randn(4, 6, dtype=torch.complex128)
    tensors = {
        "turned": whole.T,
        "row": whole[1],
        "none": torch.zeros(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.tensor(5, dtype=torch.uint8),
    }
    save(tmp_path, TrainState(parameters={}, buffers=tensors))
    filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoint.load(tmp_path, TrainState(parameters={}, buffers=filled))
    assert all(torch.equal(tensor, filled[name]) for name, tensor in tensors.items())
    assert "complex128" in refused(checkpoint.export_safetensors, tmp_path, tmp_path / "model.safetensors")


def part(rank: int, width: int = 4) -> TrainState:
    """What one of several ranks has; `tied` has a replica on each."""
    parameters = {"tied": nn.Parameter(torch.ones(500)), f"own{rank}": nn.Parameter(torch.ones(width, 4))}
    return TrainState(parameters=parameters, optimizers=(torch.optim.AdamW(parameters.values()),))


def test_the_trouble_of_one_rank_is_everybodys_error(tmp_path: Path) -> None:
    """Any other rank would wait for it, or train on with other weights."""
    two, four = tmp_path / "two", tmp_path / "four"

    def rank(index: int, channel: Channel) -> list[str]:
        load, mine = partial(checkpoint.load, channel=channel), part(index)
        with channel.watch:
            for folder, step in ((two, 2), (four, 4)):
                checkpoint.save(folder, mine, step=step, extra={"from": index}, channel=channel)
                assert load(folder, mine) == (step, {"from": 0})
            said = [
                refused(load, four, part(index, width=5 if index else 4)),
                refused(load, two if index else four, mine),
            ]
            mine.optimizers[0].state[mine.parameters["tied"]]["history"] = object() if index else 7
            save = partial(checkpoint.save, step=5, extra={}, channel=channel)
            said.append(refused(save, four, mine))
            if index == 0:
                flip_a_bit(four / "step-00000004" / "rank-1.safetensors")
            channel.all_gather_object(None)
            return [*said, refused(load, four, part(index))]

    first, second = threads(2, rank)
    assert "own1 is [5, 4]" in second[0] and "(rank 1)" in first[0]
    for said in (first, second):
        assert "rank 0 finds step-00000004 and rank 1 finds step-00000002" in said[1]
        assert "rank-1.safetensors" in said[3]
    assert "'history' of tied" in second[2] and "(rank 1)" in first[2]
    index = json.loads((two / "step-00000002" / "index.json").read_text())
    assert index["files"]["rank-0.safetensors"][0] > 500 * 4 > index["files"]["rank-1.safetensors"][0]


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def test_export_into_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, with_optimizer(adamw)) / "rank-0.safetensors"
    before = path.read_bytes()
    assert "itself" in refused(checkpoint.export_safetensors, tmp_path, path)
    assert path.read_bytes() == before


def test_export_is_one_file_that_safetensors_loads(tmp_path: Path) -> None:
    model = tied()
    optimizer = adamw(model)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    save(tmp_path / "run", replace(state_of(model, optimizer), aliases={"1.weight": "0.weight"}))
    file = tmp_path / "model.safetensors"
    checkpoint.export_safetensors(tmp_path / "run", file)
    with safe_open(file, "pt") as opened:
        assert list(opened.keys()) == ["0.weight"]
        assert opened.metadata() == {"format": "pt", "1.weight": "0.weight"}
    other = tied()
    load_model(other, str(file))
    assert torch.equal(other[1].weight, model[0].weight)
    nowhere = tmp_path / "nowhere" / "model.safetensors"
    assert str(nowhere) in refused(checkpoint.export_safetensors, tmp_path / "run", nowhere)
