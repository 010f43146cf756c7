"""Two "machines" on one: network namespaces with an interface each, and a switch whose links can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

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
