"""Ranks that are killed or frozen at any moment of a run: the others end in time and say who, and the run
goes on from its newest checkpoint to the same losses, float for float.

Linux only: ranks are found in /proc.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import processes
import pytest
from tiny_run import TRAIN, losses, prepare

RANKS = 2
STEPS = 8
KILLS = 6
IN_TIME_S = 600.0
"""A guard against a hang: without load it is some seconds, beside other jobs minutes."""


def folder_for(weights: str, made: Path, width: int = 1) -> Path:
    settings = {"steps": STEPS, "validate_every": 4}
    return prepare(made, settings, replicas=width, microbatches=3 * width, weights=weights, clips=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_for("flush", tmp_path_factory.mktemp("kills"))


def pid_of_rank(launcher: int, rank: int) -> int | None:
    """The process that a launcher has started for a rank, if it runs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            variables = stat.with_name("environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if int(parent) == launcher and state != "Z" and f"RANK={rank}".encode() in variables:
            return int(stat.parent.name)
    return None


def until(true: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for something in a run, or for the end of the run."""
    while not true() and process.poll() is None:
        time.sleep(0.001)


class Run:
    """One start of a run, at which a rank gets a signal at some moment."""

    def __init__(self, folder: Path, out: str, *more: str) -> None:
        words = ["--resume", "--steps", str(STEPS)]
        if not (folder / out / "checkpoint" / "latest").exists():
            shutil.rmtree(folder / out, ignore_errors=True)
            words = ["config.toml"]
        self.hit = False
        self.process = processes.start(*TRAIN[1:], *words, "--out", out, *more, cwd=folder)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        self.errors = self.process.communicate()[1]

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = pid_of_rank(self.process.pid, rank)
        if pid is not None:
            os.kill(pid, number)
            self.hit = True

    def wait(self) -> int:
        """Its exit status. Raises: AssertionError if it does not end in time."""
        self._reader.join(IN_TIME_S)
        in_time = not self._reader.is_alive()
        self.process.kill()
        self._reader.join()
        assert in_time, f"it had to be killed: {self.errors}"
        return self.process.returncode


def wait_for_moment(moment: str, run: Run, out: Path, draw: random.Random, last: int = RANKS - 1) -> None:
    """A moment of the named part of a run that has just been started."""
    process, checkpoints, metrics = run.process, out / "checkpoint", out / "metrics.jsonl"
    if moment == "start":  # from the first rank's start until about the first step
        until(lambda: pid_of_rank(process.pid, last), process)
        end = time.monotonic() + draw.uniform(0, 8)
        until(lambda: time.monotonic() > end or metrics.exists(), process)
    elif moment == "step":
        before = metrics.stat().st_size if metrics.exists() else 0
        until(lambda: metrics.exists() and metrics.stat().st_size > before, process)
        time.sleep(draw.uniform(0, 0.3))
    elif moment == "checkpoint":
        until(lambda: list(checkpoints.glob("*.partial")), process)
        time.sleep(draw.uniform(0, 0.05))
    else:
        until(lambda: (checkpoints / f"step-{STEPS:08d}").exists(), process)
        time.sleep(draw.uniform(0, 0.5))


def kill_often(folder: Path, kills: int, seed: int, ranks: int = RANKS) -> dict[str, int]:
    """Kill ranks of runs, each of which goes on where the one before was killed, until `kills` have been."""
    whole = Run(folder, "whole")
    assert whole.wait() == 0, whole.errors
    expected = losses(folder / "whole")
    draw, out, killed, seen = random.Random(seed), folder / "killed", 0, dict[str, int]()
    moments = ["start", "step", "checkpoint", "end"]
    while killed < kills:
        moment, rank = moments[killed % 4], draw.randrange(ranks)
        run = Run(folder, out.name)
        wait_for_moment(moment, run, out, draw, ranks - 1)
        run.signal(rank, signal.SIGKILL)
        status = run.wait()
        where = f"kill {killed} of rank {rank}, {moment}: exit status {status}, {run.errors}"
        if run.hit and status != 0:  # a rank that has told how it ended can no longer be killed
            assert status == 128 + signal.SIGKILL, where
            assert f"rank {rank} was killed by SIGKILL" in run.errors, where
            assert "Traceback" not in run.errors, where
            killed, seen[moment] = killed + 1, seen.get(moment, 0) + 1
        else:
            assert status == 0, where
        if (out / "metrics.jsonl").exists():
            found = losses(out)
            assert found.items() <= expected.items(), where
            if len(found) == STEPS and status == 0:
                shutil.rmtree(out)
    last = Run(folder, out.name)
    assert last.wait() == 0, last.errors
    assert losses(out) == expected
    return seen


@pytest.mark.slow
def test_ranks_killed_at_20_random_moments_resume_to_the_same_losses(folder: Path) -> None:
    assert kill_often(folder, 20, seed=16) == dict.fromkeys(("start", "step", "checkpoint", "end"), 5)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "width"), [("2bw", 1), ("2bw", 2), ("flush", 2)])
def test_other_runs_resume_to_the_same_losses(weights: str, width: int, tmp_path: Path) -> None:
    """The same bits, also where two pipelines sum their gradients: sums have the order of the ranks."""
    folder = folder_for(weights, tmp_path, width)
    assert sum(kill_often(folder, KILLS, seed=17, ranks=RANKS * width).values()) == KILLS


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_frozen_in_a_run_ends_it_with_the_table(rank: int, folder: Path) -> None:
    limit_s = 15
    run = Run(folder, f"frozen-{rank}", "--set", f"pipeline.timeout_s={limit_s}", "--steps", "100000")
    metrics = folder / f"frozen-{rank}" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(losses(metrics.parent)) > 2, run.process)
    run.signal(rank, signal.SIGSTOP)
    assert run.hit and run.wait() != 0
    table = re.split(r"^rank +does +waits for\n", run.errors, flags=re.MULTILINE)[-1].splitlines()[:RANKS]
    assert [line.split()[0] for line in table] == [str(r) for r in range(RANKS)], run.errors
    assert "silent for" in table[rank], run.errors
    others = "".join(table[:rank] + table[rank + 1 :])
    assert re.search(rf"rank {rank}\b|all ranks\b", others), f"others wait for it: {run.errors}"
