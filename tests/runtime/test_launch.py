"""Processes start together and end together, and none stays, whatever happens."""

import importlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import run, start, until

from pipeloom.runtime.launch import StartedRanks, terminate_as_exit

LAUNCHER = """
import json, sys
from pipeloom.runtime import launch as processes
import launch_targets
processes.GRACE_S = float(sys.argv[3])
sys.exit(processes.launch(getattr(launch_targets, sys.argv[1]), 2, args=json.loads(sys.argv[2])))
"""
Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launched() -> Iterator[Launch]:
    """Start the launcher in a process and a session of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(target: str, *args: object, grace_s: float = 0.5, **how: Any) -> subprocess.Popen[str]:
        words = (target, json.dumps(args), grace_s)
        started.append(start("-c", LAUNCHER, *words, start_new_session=True, **how))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def pids(folder: Path, count: int) -> list[int]:
    """Process ids that the ranks and their helpers wrote down."""

    def written() -> list[str]:
        return [text for file in sorted(folder.iterdir()) if (text := file.read_text())]

    until(lambda: len(written()) == count)
    return [int(text) for text in written()]


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not yet collected by its parent does not."""
    try:
        status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    except FileNotFoundError:
        pytest.skip("needs the ps command")
    return status.strip() != "" and not status.startswith("Z")


GLIBC, HUGE = "glibc.malloc.arena_max=2", "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("own", "seen"),
    [({}, f"1 {HUGE}"), ({"OMP_NUM_THREADS": "3", "GLIBC_TUNABLES": GLIBC}, f"3 {GLIBC}:{HUGE}")],
)
def test_ranks_see_what_torchrun_sets_and_output_names_the_rank(launched, monkeypatch, own, seen) -> None:
    for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, text in own.items():
        monkeypatch.setenv(name, text)
    process = launched("environment")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0
    expected = f"2 127.0.0.1 {seen} False"
    assert sorted(out.splitlines()) == [f"0 0 {expected}", f"[rank 1] 1 1 {expected}"]
    assert sorted(err.splitlines()) == ["[rank 1] to stderr", "to stderr"]


SCRIPT = """
import sys
from pipeloom.runtime.launch import launch
class Mine: pass
def work(mine): print(type(mine) is Mine, __name__)
if __name__ == '__main__': sys.exit(launch(work, 2, args=(Mine(),)))
"""


def test_a_script_may_launch_its_own_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    status, out, err = run(tmp_path / "mine.py")
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == ["True __mp_main__", "[rank 1] True __mp_main__"]


def test_a_failing_rank_ends_all_ranks(launched: Launch, tmp_path: Path) -> None:
    """Also ranks that do not listen, and what they started."""
    process = launched("fail_on_1", str(tmp_path))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err.startswith("rank 1 failed:\nTraceback (most recent call last):\n")
    assert err.endswith('raise ValueError("boom")\nValueError: boom\n')
    assert err.count("ValueError: boom") == 1
    assert "child.py" not in err, "only the user's own frames are shown"
    started = pids(tmp_path, 2)
    until(lambda: not any(alive(pid) for pid in started))


KILLED_SAYS = "rank 1 was killed by SIGKILL (perhaps the machine ran out of memory)\n"


def test_the_others_end_soon_after_a_rank_was_killed(launched: Launch) -> None:
    """It told them nothing, so they get less time than after a failure: that would be 600 s here."""
    process = launched("killed", grace_s=600)
    assert process.communicate(timeout=300)[1] == KILLED_SAYS
    assert process.returncode == 128 + signal.SIGKILL


STARTED = """
import os, signal, sys, time
from pipeloom.runtime.launch import StartedRanks
needed = bool(sys.argv[1:])
with StartedRanks(2, needed=needed) as started:
    os.kill(started._processes._ranks[1].process.pid, signal.SIGKILL)
    time.sleep(3600 if needed else 1)
    print(started.run(print))
"""


@pytest.mark.parametrize("words", [["needed"], []], ids=str)
def test_a_rank_that_is_killed_while_the_launcher_plans_ends_it_if_it_is_needed(words: list[str]) -> None:
    """A plan is not lost with ranks that were to rehearse it."""
    status, out, errors = run("-c", STARTED, *words)
    killed = 128 + signal.SIGKILL
    assert (status, errors) == (killed if words else 0, KILLED_SAYS)
    assert out.splitlines()[-1:] == ([] if words else [str(killed)])


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        (("exit_with", 3), 3, "rank 1 ended with exit status 3\n"),
        (("exit_with", "bad news"), 1, "rank 1 failed:\nbad news\n"),
        (("exit_with", "no \udcff"), 1, "rank 1 failed:\nno \\udcff\n"),
        (("exit_with", 0), 0, ""),
        (("fail_late",), 5, "rank 1 ended with exit status 5\n"),  # while the interpreter shuts down
        (("UNLOADABLE",), 1, "RuntimeError: cannot be loaded\n"),
    ],
)
def test_exit_statuses_are_passed_on_and_the_reason_is_said_once(launched, call, status, words) -> None:
    process = launched(*call)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == status
    assert said == words or (call == ("UNLOADABLE",) and said.count(words) == 1)


@pytest.mark.sampled("SIGINT-sleep", "SIGTERM-sleep", "SIGKILL-stubborn")
@pytest.mark.parametrize("target", ["sleep", "stubborn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_no_process_stays_after_a_signal(launched, tmp_path, target, number) -> None:
    process = launched(target, str(tmp_path))
    started = pids(tmp_path, 4)
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)  # as a terminal does for Ctrl-C: to the launcher's whole group
        process.communicate(timeout=300)
        assert process.returncode in (-number, 128 + number)
    until(lambda: not any(alive(pid) for pid in started))


def test_ranks_go_on_when_nobody_reads_what_they_say(launched: Launch, tmp_path: Path) -> None:
    process = launched("talk", str(tmp_path))
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().endswith("line 0\n")
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert process.stderr.read() == ""
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("launch_targets")


def test_ranks_prepare_several_things_before_they_know_their_work(tmp_path, targets) -> None:
    """And what one of them fails with stays unsaid."""
    folders = [tmp_path / name for name in ("first", "second", "ran")]
    for folder in folders:
        folder.mkdir()
    first, second, ran = map(str, folders)
    with StartedRanks(2) as started:
        started.prepare(targets.say_and_fail, (first,))
        started.prepare(targets.say_and_fail, (second,))
        before = pids(folders[1], 2)
        assert pids(folders[0], 2) == before
        assert started.run(targets.say, (ran,)) == 0
    assert pids(folders[2], 2) == before


def test_ranks_that_get_no_work_end_without_a_word(tmp_path, targets, capfd) -> None:
    ready: list[int] = []
    with pytest.raises(ValueError, match="no plan"), StartedRanks(2) as started:
        started.prepare(targets.say_and_fail, (str(tmp_path),))
        ready += pids(tmp_path, 2)
        raise ValueError("no plan")
    assert not any(alive(pid) for pid in ready)
    assert capfd.readouterr() == ("", "")


def test_a_signal_that_is_to_be_ignored_from_now_on_stays_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with terminate_as_exit():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("encoding", "seen"), [("latin-1", "caf\xe9"), ("utf-8", "caf\\xe9")])
def test_all_that_ranks_say_is_read_though_it_cannot_be_decoded(launched, encoding, seen) -> None:
    process = launched("says_much", env={"PYTHONIOENCODING": encoding}, encoding=encoding)
    out, err = process.communicate(timeout=300)
    lines = out.splitlines()
    assert (process.returncode, err, len(lines)) == (0, "", 3002)
    assert lines[0] == f"[rank 1] {seen}" and lines[-1] == "[rank 1] done"
