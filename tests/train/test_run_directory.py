"""Which directory a run gets, who may use it, what a start leaves there; metrics.jsonl."""

import errno
import fcntl
import math
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from processes import start

from pipeloom.ir.errors import ConfigError
from pipeloom.train.run_directory import LOCK, Metrics, find_run, read_metrics, run_directory


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(name: str, out: Path | None = None) -> Path:
    """A run's directory after it began to train."""
    with run_directory(name, out, resume=False) as path:
        (path / "config.toml").write_text("")
    return path


def test_runs_are_numbered_and_the_newest_is_found() -> None:
    assert trained("gpt") == Path("runs/gpt-1")
    assert trained("gpt-2") == Path("runs/gpt-2-1")  # another name, which looks like a number of the first
    for number in range(2, 11):
        assert trained("gpt") == Path(f"runs/gpt-{number}")
    Path("runs/gpt-11").mkdir()  # killed before it trained
    assert trained("gpt") == Path("runs/gpt-12")
    assert [trained("a**[x]") for _ in range(2)] == [Path("runs/a**[x]-1"), Path("runs/a**[x]-2")]
    assert find_run("gpt", None) == Path("runs/gpt-12")
    assert find_run("gpt-2", None) == Path("runs/gpt-2-1")
    assert find_run("gpt", Path("runs/gpt-3")) == Path("runs/gpt-3")
    for number in (2, 3):
        a_checkpoint(Path(f"runs/gpt-{number}"))
    assert find_run("gpt", None) == Path("runs/gpt-3")  # the newest that there is to go on with


def a_checkpoint(run: Path) -> None:
    (run / "checkpoint/step-00000002").mkdir(parents=True)
    (run / "checkpoint/step-00000002/index.json").write_text("")


def refused(out: str | None, *, resume: bool, word: str) -> None:
    """No run may use that directory."""
    with pytest.raises(ConfigError, match=word), run_directory("gpt", out and Path(out), resume=resume):
        pass


def test_what_is_wrong_is_said(here: Path) -> None:
    refused(None, resume=True, word="no run runs/gpt-<n>")
    refused("nowhere", resume=True, word="nowhere holds no run")
    (here / "file").write_text("")
    refused("file/out", resume=False, word="file/out: Not a directory")
    trained("gpt", Path("deep/inside"))
    refused("deep/inside", resume=False, word="holds a run already.*\n.*no checkpoint to go on from")
    a_checkpoint(Path("deep/inside"))
    refused("deep/inside", resume=False, word="holds a run already.*\n.*add --resume")


@pytest.mark.parametrize("out", [None, "new", "mine", "empty", "empty/deep/inside"])
def test_a_start_that_does_not_train_removes_what_it_has_made_only(here: Path, out: str | None) -> None:
    (here / "empty").mkdir()
    (here / "mine").mkdir()
    (here / "mine" / "mine.txt").write_text("")
    before = set(here.rglob("*"))
    with pytest.raises(KeyboardInterrupt), run_directory("gpt", out and Path(out), resume=False) as path:
        assert (path / LOCK).is_file()
        raise KeyboardInterrupt
    assert set(here.rglob("*")) == before


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL])
def test_a_disk_without_locks_is_trained_on_with_a_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(code, os.strerror(code))))
    assert sorted(file.name for file in trained("gpt", here / "a").iterdir()) == ["config.toml"]
    assert "disk without locks" in caplog.text


def test_a_disk_that_refuses_the_lock_is_left_as_it_was(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    refused("a/b", resume=False, word="cannot lock a/b")
    assert not list(here.iterdir())


def test_a_run_on_a_disk_that_cannot_be_written_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained("gpt", here / "a")
    read_only = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "unlink", read_only)  # so does such a disk, also of a file that is not there
    refused("a", resume=True, word="cannot lock a: Read-only")


def test_a_directory_is_held_until_the_end(here: Path) -> None:
    run = trained("gpt", Path("a"))
    with run_directory("gpt", run, resume=True):
        for resume in (True, False):
            refused("a", resume=resume, word="a is in use")
        assert (run / LOCK).is_file()
    assert not (run / LOCK).exists()
    code = "import os, pathlib, signal; from pipeloom.train.run_directory import run_directory\n"
    code += "with run_directory('gpt', pathlib.Path('a'), resume=True): os.kill(os.getpid(), signal.SIGKILL)"
    assert start("-c", code).wait(300) == -signal.SIGKILL and (run / LOCK).is_file()
    with run_directory("gpt", run, resume=True) as path:  # who was killed holds nothing
        assert path == run


def a_link(path: Path) -> None:
    path.symlink_to(path.parent.parent.absolute() / "victim")


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoint", LOCK])
@pytest.mark.parametrize(("make", "word"), [(a_link, "is a link to"), (os.mkfifo, "is in the way")])
def test_a_run_keeps_its_files_in_its_own_directory(
    here: Path, name: str, make: Callable[[Path], None], word: str
) -> None:
    run = trained("gpt", Path("a"))
    (here / "victim").write_text("mine")
    make(run / name)
    refused("a", resume=True, word=f"{name} {word}")
    assert (here / "victim").read_text() == "mine"


def test_the_directory_itself_may_be_a_link(here: Path) -> None:
    trained("gpt", here / "disk")
    (here / "run").symlink_to(here / "disk")
    with run_directory("gpt", here / "run", resume=True) as path:
        assert path == here / "run"


def test_metrics_are_on_disk_at_once_and_a_full_disk_is_one_sentence(here: Path) -> None:
    file = here / "m.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ConfigError, match="cannot write .*/m.jsonl"):  # noqa: SIM117
            with Metrics(file, after_step=0) as metrics:
                for step in range(20):
                    metrics.write({"step": step, "grad_norm": None})
                    assert file.read_text().endswith(f'{{"step": {step}}}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with Metrics(file, after_step=9) as metrics:
        assert [line.step for line in read_metrics(metrics.path)] == list(range(8))


DAMAGED = [b"", b"\0" * 40, b'{"step": 2, "x": "\xff"}', b"[2]", b'{"step": 2, "loss": "1"}', b"[" * 100_000]


@pytest.mark.parametrize("damage", DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_no_line_of_figures_is_dropped(
    here: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = here / "m.jsonl"
    first, third = b'{"step": 1, "loss": 3.0}\n', b'{"step": 3, "loss": 2.0, "a": 1}\n'
    file.write_bytes(first + damage + b"\n" + third + b'{"step": 4')
    with Metrics(file, after_step=5) as metrics:
        assert [(line.step, line.loss) for line in read_metrics(metrics.path)] == [(1, 3.0), (3, 2.0)]
    assert file.read_bytes() == first + third
    assert "1 lines" in caplog.text


def test_losses_that_are_no_numbers_are_read_again(here: Path) -> None:
    with Metrics(here / "m.jsonl", after_step=0) as metrics:
        metrics.write({"step": 1, "loss": math.inf, "grad_norm": math.nan})
        metrics.write({"step": 2, "loss": 1.0, "validation_loss": -math.inf})
    with Metrics(here / "m.jsonl", after_step=2) as metrics:
        found = [(line.loss, line.validation_loss) for line in read_metrics(metrics.path)]
    assert found == [(math.inf, None), (1.0, -math.inf)]
