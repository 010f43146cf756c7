"""One run at a time in a directory; whoever holds it is named, and who is gone holds nothing."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import even_plan

from pipeloom.ir.errors import ConfigError
from pipeloom.train.config import Config
from pipeloom.train.config_text import write_config
from pipeloom.train.rank_processes import RankProcesses
from pipeloom.train.run import PlannedRun, TrainRequest, prepare_run, run
from pipeloom.train.run_lock import LOCK, RunLock
from pipeloom.train.workload import Workload

MODULE = sys.modules[run.__module__]
ME = f"process {os.getpid()} on {socket.gethostname()}"


def test_a_directory_is_held_until_the_end(tmp_path: Path) -> None:
    with RunLock() as first:
        first.take(tmp_path)
        with (
            RunLock() as second,
            pytest.raises(ConfigError, match=f"is in use by {ME}\nhint: wait"),
        ):
            second.take(tmp_path)
        assert (tmp_path / LOCK).is_file()
    assert not (tmp_path / LOCK).exists()
    with RunLock() as third:
        third.take(tmp_path)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = "import os, pathlib, signal, sys; from pipeloom.train.run_lock import RunLock\n"
    code += "RunLock().take(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL and (tmp_path / LOCK).is_file()
    with RunLock() as lock:
        lock.take(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"pid": "x"}', b"[" * 4000])
def test_a_damaged_note_names_nobody(tmp_path: Path, content: bytes) -> None:
    with RunLock() as first, RunLock() as second:
        first.take(tmp_path)
        (tmp_path / LOCK).write_bytes(content)
        with pytest.raises(ConfigError, match="is in use by another process"):
            second.take(tmp_path)


def test_a_link_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "victim")
    with RunLock() as lock, pytest.raises(ConfigError, match="cannot lock"):
        lock.take(tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"


def planned(config: Config, workload: Workload, console: object) -> PlannedRun:
    return PlannedRun(even_plan(workload.job, 1, microbatches=config.pipeline.microbatches))


def test_a_second_run_is_refused_and_leaves_the_first_alone(tiny: Config, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(write_config(tiny))
    new = TrainRequest(file=tmp_path / "config.toml", out=tmp_path / "a")
    with RunLock() as first:
        prepared = prepare_run(new, RankProcesses(), planned, lock=first)
        before = {path.name: path.read_bytes() for path in prepared.out.iterdir()}
        for request in (TrainRequest(out=tmp_path / "a", resume=True), new):
            with RunLock() as second, pytest.raises(ConfigError, match="in use by|holds a run already"):
                prepare_run(request, RankProcesses(), planned, lock=second)
        (prepared.out / "config.toml").unlink()  # as if both had begun at the same moment
        with RunLock() as second, pytest.raises(ConfigError, match="in use by"):
            prepare_run(new, RankProcesses(), planned, lock=second)
        (prepared.out / "config.toml").write_bytes(before["config.toml"])
        assert {path.name: path.read_bytes() for path in prepared.out.iterdir()} == before
        prepared.snapshot.restore(prepared.out)
    assert not prepared.out.exists()


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("ends_by", [KeyboardInterrupt, SystemExit])
def test_however_it_is_ended_it_says_how_far_it_is(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, ends_by: type[BaseException]
) -> None:
    """SIGTERM said nothing; a second Ctrl-C came in the middle of the sentence."""
    (tmp_path / "config.toml").write_text(write_config(tiny))
    (tmp_path / "plan.json").touch()

    def launch(*_: object, **__: object) -> int:
        (tmp_path / "a" / "metrics.jsonl").write_text("")  # it has begun
        raise ends_by(143)

    def impatient(out: Path) -> str:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return "kept"

    monkeypatch.setattr("pipeloom.train.rank_processes.launch", launch)
    monkeypatch.setattr(MODULE, "make_plan", planned)
    monkeypatch.setattr(MODULE, "interrupted", impatient)
    with pytest.raises(ends_by):
        run(TrainRequest(file=tmp_path / "config.toml", out=tmp_path / "a"), RankProcesses())
    assert capsys.readouterr().err == "kept\n"
    assert not (tmp_path / "a" / LOCK).exists()
