"""Two machines under torchrun, whose link is cut in the middle of a run: both sides end in time with the
reason, and the run goes on when the link is there again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from processes import until
from tiny_run import losses, prepare
from two_machines import INTERFACE, CannotIsolate, TwoMachines, two_machines

LIMIT_S = 15
STEPS = 300


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    try:
        with two_machines() as made:
            yield made
    except CannotIsolate as reason:
        pytest.skip(f"network namespaces cannot be made here: {reason}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    settings = {"steps": STEPS, "validate_every": 1000, "checkpoint_every": 20, "rehearsals": 0}
    return prepare(tmp_path, settings | {"pipeline.timeout_s": float(LIMIT_S)})


def start(machines: TwoMachines, folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    """torchrun on both machines, which meet at the first one's address."""
    started = []
    for machine in range(2):
        meeting = {
            "--nnodes": "2",
            "--nproc-per-node": "1",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"{machines.address(0)}:29400",
            "--rdzv-id": "test",
            "--rdzv-conf": f"is_host={1 - machine}",
            "--local-addr": machines.address(machine),
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", *chain.from_iterable(meeting.items())]
        command = machines.command(machine, [*torchrun, "-m", "pipeloom", "train", *words])
        env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        with (folder / f"said-{machine}").open("w") as said:
            process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=said, stderr=said, text=True, start_new_session=True
            )
        started.append(process)
    return started


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def ranks_left(machine: str) -> list[str]:
    """The ranks that still run on a machine."""
    pids = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True).stdout.split()
    left = []
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"pipeloom" in command and b"torch.distributed.run" not in command:
            left.append(pid)
    return left


@pytest.mark.slow
def test_a_cut_link_ends_both_sides_with_the_reason_and_the_run_goes_on(
    machines: TwoMachines, folder: Path
) -> None:
    run = folder / "cut"
    running = start(machines, folder, "config.toml", "--out", "cut")
    try:
        until(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 40)
        machines.cut_link(1)
        begin = time.monotonic()
        until(lambda: not any(map(ranks_left, machines.names)), limit_s=8 * LIMIT_S)
        took_s = time.monotonic() - begin
    finally:
        end(running)
        said = [(folder / f"said-{machine}").read_text() for machine in range(2)]
        print(*said)
    assert took_s < 6 * LIMIT_S
    for machine, text in enumerate(said):
        assert (
            f"rank {1 - machine} failed: no sign of life" in text
            or "has not answered for" in text
            or (f"rank {machine} waited {LIMIT_S}" in text)
        ), text
        assert re.search(r"^rank +does +waits for$", text, re.MULTILINE), text
        assert re.search(rf"^{1 - machine} .*\(silent for \d+ s\)$", text, re.MULTILINE), text
        assert "they wait for each other" not in text, "what the silent one does is not known"
    machines.mend_link(1)
    before = losses(run)
    again = start(machines, folder, "--resume", "--out", "cut")
    try:
        for process in again:
            assert process.wait(timeout=400) == 0, (folder / "said-0").read_text()
    finally:
        end(again)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    kept = {step: loss for step, loss in before.items() if step in losses(run)}
    assert kept == {step: losses(run)[step] for step in kept}, "the same losses to the last bit"
