"""Damaged files into everything that reads a file: it is read, or refused in a sentence, and in no time.

A trial takes a file that pipeloom wrote, damages it as disks, editors and people do, and reads it as commands
do. Where a checksum lies beside it, half the trials set that right again, so that the readers behind it are
tried, too.
"""

import json
import shutil
import signal
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from damage import GOOD, GRAPH, LINES, PLAN, changed, ours, read_plan
from hypothesis import HealthCheck, event, given, strategies as st
from torch import nn
from trials import examples

from pipeloom.checks.schedules import check
from pipeloom.clusters.files import load_cluster, save_cluster
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.profile import Profile
from pipeloom.ir.stages import chain
from pipeloom.ir.text import load_noun, save_noun
from pipeloom.ranks import checkpoint_step
from pipeloom.runtime import checkpoint
from pipeloom.runtime.checkpoint import TrainState
from pipeloom.schedules.formats import read_schedule
from pipeloom.train.config import Config, read_config, write_config
from pipeloom.train.run import TrainRequest, decide
from pipeloom.train.run_directory import Metrics, find_run, has_report

CALM = [HealthCheck.function_scoped_fixture]
SOME = examples(100, 2_500, suppress_health_check=CALM)
HANGS_S = 30
"""No measure of anything: a trial takes milliseconds."""


@dataclass(frozen=True)
class Kind:
    """A kind of file. names: what is damaged of it.  write: into an empty folder.  read: as commands do."""

    names: tuple[str, ...]
    write: Callable[[Path], None]
    read: Callable[[Path], None]


def a_state() -> TrainState:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    buffers = {"count": torch.zeros((), dtype=torch.int64)}
    return TrainState(parameters=dict(layer.named_parameters()), buffers=buffers, optimizers=(optimizer,))


def write_checkpoint(folder: Path) -> None:
    for step in (1, 2):
        extra = {"user": {"step": step}, "rates": [0.5, None]}
        checkpoint.save(folder, a_state(), step=step, extra=extra)


def read_checkpoint(folder: Path) -> None:
    ours(lambda: checkpoint_step(folder))
    ours(lambda: checkpoint.load(folder, a_state()))
    ours(lambda: checkpoint.export_safetensors(folder, folder / "out.safetensors"))


def write_run(folder: Path) -> None:
    (folder / "config.toml").write_text(write_config(Config()))
    PLAN.save(folder / "plan.json")
    lines = [{"step": s, "loss": 1.0 / (s + 1), "peak_bytes": [1, 2]} for s in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"steps": 2, "first_step": 0, "train_loss": [2.0, 1.0]}))
    for name in ("trace.json", "report.html"):
        (folder / name).write_text("")
    write_checkpoint(folder / "checkpoint")


def read_run(folder: Path) -> None:
    """As `train --resume` does, up to where ranks start."""
    request = TrainRequest(out=folder, resume=True, as_json=True)
    ours(lambda: decide(request, find_run("gpt", folder)))
    ours(lambda: has_report(folder, checkpoint_step(folder / "checkpoint")))
    ours(lambda: Metrics(folder / "metrics.jsonl", after_step=2).__exit__(None, None, None))


def one_file(name: str, write: Callable[[Path], Any], read: Callable[[Path], Any]) -> Kind:
    return Kind((name,), lambda f: write(f / name), lambda f: ours(lambda: read(f / name)))


def text_of(text: str) -> Callable[[Path], Any]:
    return lambda file: file.write_text(text)


def read_rows(file: Path) -> None:
    found = read_schedule(file)
    if found.stages < 100:
        check(found, chain(found.stages))


FILES_OF_A_RUN = ("config.toml", "metrics.jsonl", "summary.json", "checkpoint/latest")
FILES_OF_A_RUN += ("checkpoint/step-00000002/index.json",)
PROFILE = Profile(device="cpu", source="measured", graph=GRAPH.fingerprint, batch=("x[2]float32",), costs={})

KINDS = {
    "plan": Kind(("plan.json",), lambda f: PLAN.save(f / "plan.json"), read_plan),
    "profile": one_file("p.json", partial(save_noun, PROFILE), lambda file: load_noun(file, Profile)),
    "graph": one_file("g.json", partial(save_noun, GRAPH), lambda f: load_noun(f, OpGraph).fingerprint),
    "cluster": one_file("c.toml", partial(save_cluster, cpu_cluster(2)), load_cluster),
    "config": one_file("config.toml", text_of(write_config(Config())), read_config),
    "rows": one_file("s.txt", text_of("\n".join(PLAN.schedule_rows)), read_rows),
    "csv": one_file("s.csv", text_of("0F0,0SEND_F0,,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"), read_rows),
    "run": Kind(FILES_OF_A_RUN, write_run, read_run),
    "checkpoint": Kind(
        ("latest", "step-00000002/index.json", "step-00000002/rank-0.safetensors"),
        write_checkpoint,
        read_checkpoint,
    ),
}


@pytest.fixture(scope="module")
def whole() -> Iterator[dict[str, Path]]:
    """A folder of undamaged files of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        places = {kind: Path(folder) / kind for kind in KINDS}
        for kind, place in places.items():
            place.mkdir()
            KINDS[kind].write(place)
        yield places


WORDS = st.sampled_from(["", "../x", "/dev/zero", "\0", "float32", "nan", "é", "x" * 400]) | GOOD | LINES
LONG_ONES = [b"\0" * 64, b"[" * 3000, b'{"a":' * 3000, b"9" * 5000]
BREAKS = [b"\n", b"\n\n", b"\r", b"\xff\xfe", b"\xed\xa0\x80", b'"\xff"', b"\xef\xbb\xbf"]
VALUES = [b"NaN", b"null", b"true", b'""', b"[]", b"{}", b"../..", b"-", b"1e999"]
INSERTED = st.sampled_from([*LONG_ONES, *BREAKS, *VALUES]) | st.binary(max_size=8)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """As a power cut, a disk, an editor or somebody curious leaves a file."""
    how = draw(st.sampled_from(["cut", "insert", "replace", "flip", "twice", "empty", *["json"] * 4]))
    event(how)
    if how == "json":
        try:
            plain = json.loads(content)
            for _ in range(draw(st.integers(1, 3))):
                plain = changed(draw, plain, WORDS)
            return json.dumps(plain).encode()
        except ValueError:
            how = "replace"
    at = draw(st.integers(0, len(content)))
    to = min(len(content), at + draw(st.integers(0, 40)))
    piece = content[at:to]
    new = {
        "cut": b"",
        "empty": b"",
        "insert": draw(INSERTED) + piece,
        "replace": draw(INSERTED),
        "flip": bytes(b ^ draw(st.sampled_from([1, 32, 128])) for b in piece[:1]) + piece[1:],
        "twice": piece * 2,
    }[how]
    return b"" if how == "empty" else content[:at] + new + (b"" if how == "cut" else content[to:])


def sign(file: Path) -> None:
    """Set right what index.json says of a file beside it."""
    index = file.with_name("index.json")
    if file == index or not index.is_file():
        return
    plain, content = json.loads(index.read_text()), file.read_bytes()
    plain["files"][file.name] = [len(content), zlib.crc32(content)]
    index.write_text(json.dumps(plain))


@contextmanager
def no_hang() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"no answer within {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kinds", [sorted(KINDS), ["plan"]])
@SOME
@given(data=st.data())
def test_damaged_files(data: st.DataObject, kinds: list[str], whole: dict[str, Path]) -> None:
    name = data.draw(st.sampled_from(kinds), label="kind")
    kind = KINDS[name]
    target = data.draw(st.sampled_from(kind.names), label="file")
    content = data.draw(damaged((whole[name] / target).read_bytes()), label="content")
    signs = data.draw(st.booleans(), label="signed")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), no_hang():
        warnings.simplefilter("ignore")
        place = Path(folder) / "files"
        shutil.copytree(whole[name], place)
        (place / target).write_bytes(content)
        if signs:
            sign(place / target)
        kind.read(place)


@pytest.mark.parametrize("kind", KINDS)
def test_files_as_they_are(kind: str, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (globals(), vars(damage)):
        monkeypatch.setitem(names, "ours", lambda read: read())
    KINDS[kind].read(whole[kind])
