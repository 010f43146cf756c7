"""Checkpoints that somebody else made: nothing in them runs, nothing leads out of their directory."""

import io
import json
import os
import pickle
import zlib
from functools import partial
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


WITH_MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


def a_state(optimizer_of: Any = WITH_MOMENTUM) -> TrainState:
    torch.manual_seed(0)
    parameters = dict(nn.Linear(4, 2).named_parameters())
    optimizer = optimizer_of(parameters.values(), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(parameters=parameters, optimizers=(optimizer,))


def save(folder: Path, state: TrainState) -> Path:
    return checkpoint.save(folder, state, step=1, extra={})


def put(path: Path, name: str, content: bytes, *, listed: bool = True) -> None:
    """Replace a file, and its checksum too, as whoever changes one on purpose does."""
    (path / name).write_bytes(content)
    index = json.loads((path / "index.json").read_text())
    if listed:
        index["files"][name] = [len(content), zlib.crc32(content)]
    (path / "index.json").write_text(json.dumps(index))


def refused(path: Path, match: str) -> None:
    """By whoever loads it, and by whoever exports it."""
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.load(path, a_state())
    assert "\n" not in caught.value.message and caught.value.hint
    with pytest.raises(CheckpointError, match=match):
        checkpoint.export_safetensors(path, path.parent / "out.safetensors")


def test_no_file_of_a_checkpoint_is_a_pickle_of_objects(tmp_path: Path) -> None:
    path = save(tmp_path, a_state())
    assert sorted(p.name for p in path.iterdir()) == ["index.json", "rank-0.safetensors"]


def test_a_pickle_beside_a_checkpoint_is_left_alone(tmp_path: Path, ran: Path) -> None:
    path = save(tmp_path, a_state())
    for listed in (False, True):
        put(path, ".metadata", pickle.dumps(Evil(ran)), listed=listed)
        assert checkpoint.load(path, a_state())[0] == 1
        checkpoint.export_safetensors(path, tmp_path / "out.safetensors")
    assert not ran.exists()


@pytest.mark.parametrize("archive", [True, False])
def test_tensors_that_are_something_else_do_not_run(tmp_path: Path, ran: Path, archive: bool) -> None:
    path = save(tmp_path, a_state())
    stream = io.BytesIO()
    torch.save(Evil(ran), stream, _use_new_zipfile_serialization=archive)
    evil = stream.getvalue().ljust(1000, b"\0") if not archive else stream.getvalue()
    put(path, "rank-0.safetensors", evil)
    refused(path, "corrupt: rank-0.safetensors: ")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("field", "key", "value", "message"),
    [
        ("tensors", "model.weight", "../../secret", "in '../../secret', no file of the checkpoint"),
        ("tensors", "model.more", "rank-0.safetensors", "'model.more' is not in it"),
        ("tensors", "model.weight", None, "does not say where 'weight' is"),
        ("model", "weight", [[1 << 40, 1 << 40], "float32"], "and not .*1099511627776"),
        ("model", "weight", [[2, 2], "save"], "and not|has .* save"),
    ],
)
def test_an_index_that_says_what_is_not_is_refused(
    tmp_path: Path, field: str, key: str, value: object, message: str
) -> None:
    path = save(tmp_path / "run", a_state())
    (tmp_path / "secret").write_text("secret")
    index = json.loads((path / "index.json").read_text())
    index[field][key] = value
    if value is None:
        del index[field][key]
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, a_state())


def test_a_header_that_says_what_is_not_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, a_state())
    entry = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    header = json.dumps({"model.weight": entry}).encode()
    put(path, "rank-0.safetensors", len(header).to_bytes(8, "little") + header)
    refused(path, "corrupt: rank-0.safetensors: ")


def test_an_index_that_has_lost_an_entry_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, a_state(torch.optim.AdamW))
    index = json.loads((path / "index.json").read_text())
    del index["tensors"]["optimizer.weight.step"]
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="AdamW cannot take its state"):
        checkpoint.load(tmp_path, a_state(torch.optim.AdamW))


def test_a_long_word_does_not_fill_the_message(tmp_path: Path) -> None:
    index = save(tmp_path, a_state()) / "index.json"
    known = json.loads(index.read_text())
    known["model"]["bias"][1] = 5000 * "9"
    index.write_text(json.dumps(known))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, a_state())
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "..", ".", "a/b"])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "run", a_state())
    (tmp_path / "secret").write_text("secret")
    index = json.loads((path / "index.json").read_text())
    index["files"][name] = [6, zlib.crc32(b"secret")]
    (path / "index.json").write_text(json.dumps(index))
    refused(path, "index.json: it names the file .*, which is not in its folder")


def test_latest_stays_in_its_directory(tmp_path: Path) -> None:
    mine, other = save(tmp_path / "mine", a_state()), save(tmp_path / "other", a_state())
    for name in ("../other/step-00000001", str(other), "", "\0", "x" * 5000):
        (mine.parent / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="latest names no checkpoint of its directory: ") as caught:
            newest(mine.parent)
        assert caught.value.hint == "write the one to go on with there: step-00000001"
    (mine.parent / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="latest names no checkpoint"):
        newest(mine.parent)


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
    content = (mine / "rank-0.safetensors").read_bytes()
    (mine / "rank-0.safetensors").unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    (mine / "rank-0.safetensors").symlink_to(tmp_path / "elsewhere")
    refused(mine, "corrupt: rank-0.safetensors is no file but a link")
    (mine / "rank-0.safetensors").unlink()
    os.mkfifo(mine / "rank-0.safetensors")  # which would be waited for
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
