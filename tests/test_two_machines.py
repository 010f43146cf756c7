"""Two machines under torchrun, whose link is cut in the middle of a run: both sides end in time with the
reason, and the run goes on when the link is there again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from processes import until
from tiny_run import losses, prepare

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
    settings = {"steps": STEPS, "validate_every": 1000, "checkpoint_every": 20}
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


# Two "machines" on one: network namespaces with an interface each, and a switch whose links can be cut.


INTERFACE = "eth0"


class CannotIsolate(Exception):
    """This system lets nobody make network namespaces, or lacks the tool for it."""


@dataclass(frozen=True)
class TwoMachines:
    """names: of their namespaces.  switch: the namespace in between."""

    names: tuple[str, str]
    switch: str

    def address(self, machine: int) -> str:
        return f"10.99.0.{machine + 1}"

    def command(self, machine: int, words: Sequence[str]) -> list[str]:
        """What runs a command there."""
        return ["ip", "netns", "exec", self.names[machine], *words]

    def cut_link(self, machine: int) -> None:
        """Unplug a machine's cable at the switch: nothing arrives, and nobody is told."""
        _ip("-n", self.switch, "link", "set", f"port{machine}", "down")

    def mend_link(self, machine: int) -> None:
        _ip("-n", self.switch, "link", "set", f"port{machine}", "up")


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """Raises: CannotIsolate, with the reason."""
    if shutil.which("ip") is None:
        raise CannotIsolate("there is no tool `ip` (iproute2)")
    prefix = f"pipeloom-{os.getpid()}"
    machines = TwoMachines((f"{prefix}-0", f"{prefix}-1"), f"{prefix}-switch")
    with ExitStack() as stack:
        for name in (*machines.names, machines.switch):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("-n", machines.switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", machines.switch, "link", "set", "bridge0", "up")
        for index, name in enumerate(machines.names):
            port = f"port{index}"
            peer = ["peer", "name", INTERFACE, "netns", name]
            _ip("-n", machines.switch, "link", "add", port, "type", "veth", *peer)
            _ip("-n", machines.switch, "link", "set", port, "master", "bridge0")
            _ip("-n", machines.switch, "link", "set", port, "up")
            _ip("-n", name, "address", "add", f"{machines.address(index)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", device, "up")
            _run(machines.command(index, ["true"]))
        yield machines


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotIsolate(f"`{' '.join(command)}`: {done.stderr.strip()}")
