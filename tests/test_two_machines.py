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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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
    env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    for machine in range(2):
        meeting = (
            "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id test "
            f"--rdzv-endpoint {machines.address(0)}:29400 --rdzv-conf is_host={1 - machine} "
            f"--local-addr {machines.address(machine)}"
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting.split()]
        command = machines.command(machine, [*torchrun, "-m", "pipeloom", "train", *words])
        with (folder / f"said-{machine}").open("w") as said:
            how = {"stdout": said, "stderr": said, "text": True, "start_new_session": True}
            started.append(subprocess.Popen(command, cwd=folder, env=env, **how))
    return started


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ranks_left(machine: str) -> list[str]:
    """The ranks that still run on a machine."""
    pids = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True).stdout.split()
    left = []
    for pid in pids:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"pipeloom" in command and b"torch.distributed.run" not in command:
                left.append(pid)
    return left


@pytest.mark.slow
def test_a_cut_link_ends_both_sides_with_the_reason_and_the_run_goes_on(machines, folder):
    run = folder / "cut"
    running = start(machines, folder, "config.toml", "--out", "cut")
    try:
        until(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 40)
        machines.set_link(1, "down")
        begin = time.monotonic()
        until(lambda: not any(map(ranks_left, machines.names)), limit_s=8 * LIMIT_S)
        took_s = time.monotonic() - begin
    finally:
        end(running)
        said = [(folder / f"said-{machine}").read_text() for machine in range(2)]
        print(*said)
    assert took_s < 6 * LIMIT_S
    for machine, text in enumerate(said):
        reasons = (
            f"rank {1 - machine} failed: no sign of life|has not answered for|rank {machine} waited {LIMIT_S}"
        )
        assert re.search(reasons, text), text
        assert re.search(r"^rank +does +waits for$", text, re.MULTILINE), text
        assert re.search(rf"^{1 - machine} .*\(silent for \d+ s\)$", text, re.MULTILINE), text
        assert "they wait for each other" not in text, "what the silent one does is not known"
    machines.set_link(1, "up")
    before = losses(run)
    again = start(machines, folder, "--resume", "--out", "cut")
    try:
        for process in again:
            assert process.wait(timeout=400) == 0, (folder / "said-0").read_text()
    finally:
        end(again)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert before.items() <= losses(run).items(), "the same losses to the last bit"


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

    def set_link(self, machine: int, state: str) -> None:
        """Of a machine's cable at the switch: if it is "down" nothing arrives, and nobody is told."""
        _ip(f"-n {self.switch} link set port{machine} {state}")


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """Raises: CannotIsolate, with the reason."""
    if shutil.which("ip") is None:
        raise CannotIsolate("there is no tool `ip` (iproute2)")
    prefix = f"pipeloom-{os.getpid()}"
    machines = TwoMachines((f"{prefix}-0", f"{prefix}-1"), f"{prefix}-switch")
    with ExitStack() as stack:
        for name in (*machines.names, machines.switch):
            _ip(f"netns add {name}")
            stack.callback(_ip, f"netns del {name}")
        _ip(f"-n {machines.switch} link add bridge0 type bridge")
        _ip(f"-n {machines.switch} link set bridge0 up")
        for index, name in enumerate(machines.names):
            peer = f"peer name {INTERFACE} netns {name}"
            _ip(f"-n {machines.switch} link add port{index} type veth {peer}")
            _ip(f"-n {machines.switch} link set port{index} master bridge0 up")
            _ip(f"-n {name} address add {machines.address(index)}/24 dev {INTERFACE}")
            for device in ("lo", INTERFACE):
                _ip(f"-n {name} link set {device} up")
            _ip(f"netns exec {name} true")
        yield machines


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    if done.returncode:
        raise CannotIsolate(f"`ip {words}`: {done.stderr.strip()}")
