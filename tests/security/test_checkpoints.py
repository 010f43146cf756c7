"""Checkpoints that somebody else made: nothing in them runs, nothing leads out of their directory."""

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.ir.errors import CheckpointError
from pipeloom.runtime import checkpoint
from pipeloom.runtime.checkpoint import TrainState
from pipeloom.runtime.checkpoint_directory import newest


class Evil:
    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return (Path.touch, (self.ran,))


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def a_state() -> TrainState:
    torch.manual_seed(0)
    parameters = dict(nn.Linear(4, 2).named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(parameters=parameters, optimizers=(optimizer,))


def save(folder: Path, state: TrainState) -> Path:
    return checkpoint.save(folder, state, step=1, extra={})


def change_index(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((path / "index.json").read_text())
    edit(index)
    (path / "index.json").write_text(json.dumps(index))


def put(path: Path, name: str, content: bytes) -> None:
    """Replace a file, and its checksum too, as whoever changes one on purpose does."""
    (path / name).write_bytes(content)
    change_index(path, lambda index: index["files"].update({name: [len(content), zlib.crc32(content)]}))


def refused(path: Path, match: str) -> None:
    """By whoever loads it, and by whoever exports it."""
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.load(path, a_state())
    assert "\n" not in caught.value.message and caught.value.hint
    with pytest.raises(CheckpointError, match=match):
        checkpoint.export_safetensors(path, path.parent / "out.safetensors")


def test_a_pickle_beside_a_checkpoint_is_left_alone(tmp_path: Path, ran: Path) -> None:
    path = save(tmp_path, a_state())
    assert sorted(p.name for p in path.iterdir()) == ["index.json", "rank-0.safetensors"]
    for lists in (Path.write_bytes, lambda file, content: put(path, file.name, content)):
        lists(path / ".metadata", pickle.dumps(Evil(ran)))
        assert checkpoint.load(path, a_state())[0] == 1
        checkpoint.export_safetensors(path, tmp_path / "out.safetensors")
    assert not ran.exists()


@pytest.mark.parametrize("archive", [True, False])
def test_tensors_that_are_something_else_do_not_run(tmp_path: Path, ran: Path, archive: bool) -> None:
    stream = io.BytesIO()
    torch.save(Evil(ran), stream, _use_new_zipfile_serialization=archive)
    evil = stream.getvalue().ljust(1000, b"\0") if not archive else stream.getvalue()
    header = json.dumps({"model.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}})
    path = save(tmp_path, a_state())
    for content in (evil, len(header).to_bytes(8, "little") + header.encode()):
        put(path, "rank-0.safetensors", content)
        refused(path, "corrupt: rank-0.safetensors: ")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda i: i["tensors"].update({"model.weight": "../../secret"}), "in '../../secret', no file of"),
        (lambda i: i["tensors"].update({"model.more": "rank-0.safetensors"}), "'model.more' is not in it"),
        (lambda i: i["tensors"].pop("model.weight"), "does not say where 'weight' is"),
        (lambda i: i["model"].update(weight=[[1 << 40, 1 << 40], "float32"]), "and not .*1099511627776"),
        (lambda i: i["model"].update(weight=[[2, 2], "save"]), "and not|has .* save"),
        (lambda i: i["model"].update(bias=[[2], 5000 * "9"]), "999"),
        (lambda i: i["tensors"].pop("optimizer.weight.step"), "AdamW cannot take its state"),
    ],
    ids=["a file elsewhere", "a tensor too many", "no file", "large", "no dtype", "a long word", "no step"],
)
def test_an_index_that_says_what_is_not_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    path = save(tmp_path / "run", a_state())
    (tmp_path / "secret").write_text("secret")
    change_index(path, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(path, a_state())
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "..", ".", "a/b"])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "run", a_state())
    (tmp_path / "secret").write_text("secret")
    change_index(path, lambda index: index["files"].update({name: [6, zlib.crc32(b"secret")]}))
    refused(path, "index.json: it names the file .*, which is not in its folder")


def test_latest_stays_in_its_directory(tmp_path: Path) -> None:
    mine, other = save(tmp_path / "mine", a_state()), save(tmp_path / "other", a_state())
    for name in ("../other/step-00000001", str(other), "", "\0", "x" * 5000, "\udcff"):
        (mine.parent / "latest").write_text(name, errors="surrogateescape")
        with pytest.raises(CheckpointError, match="latest names no checkpoint of its directory: ") as caught:
            newest(mine.parent)
        assert caught.value.hint == "write the one to go on with there: step-00000001"


def test_links_among_checkpoints_are_not_followed(tmp_path: Path) -> None:
    mine, other = save(tmp_path / "mine", a_state()), save(tmp_path / "other", a_state())
    (mine.parent / "step-00000009").symlink_to(other)
    (mine.parent / "latest").rename(mine.parent / "elsewhere")
    (mine.parent / "latest").symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match="link"):
        newest(mine.parent)
    (mine.parent / "latest").unlink()
    (mine.parent / "latest").write_text("step-00000009")
    assert newest(mine.parent) == mine
    (tensors := mine / "rank-0.safetensors").rename(tmp_path / "elsewhere")
    tensors.symlink_to(tmp_path / "elsewhere")
    refused(mine, "corrupt: rank-0.safetensors is no file but a link")
    tensors.unlink()
    os.mkfifo(tensors)  # which would be waited for
    refused(mine, "corrupt: rank-0.safetensors is no file but a device or pipe")


def test_saving_writes_through_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "latest.partial").symlink_to(victim)
    (folder / "latest").symlink_to(victim)
    (folder / "step-00000007.partial").symlink_to(tmp_path, target_is_directory=True)
    path = save(folder, a_state())
    assert victim.read_text() == "mine" and newest(folder) == path
    assert not (folder / "latest").is_symlink() and not (folder / "step-00000007.partial").exists()
