"""Python in processes of its own, whose output is read: one, or one for each rank."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 1800.0
"""Guards against a hang; below the hour of a rank that only sleeps."""


def until(true: Callable[[], object], limit_s: float = 300.0) -> None:
    """Wait for what another process does."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def start(*words: object, env: dict[str, str] | None = None, **how: Any) -> subprocess.Popen[str]:
    """`python WORDS`, which can import what tests can."""
    folders = [Path(__file__).parent, Path(__file__).parents[1] / "runtime", *sys.path]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={"OMP_NUM_THREADS": "1", **os.environ, **paths, **(env or {})},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how},
    )


def start_ranks(count: int, *words: object, env: dict[str, str] | None = None) -> list[subprocess.Popen[str]]:
    """One for each rank, with the variables that a launcher sets, and nobody who looks after them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), **(env or {})}
    return [start(*words, env=meeting | {"RANK": str(rank)}) for rank in range(count)]


def ends_of(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each. What hangs is killed."""
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def run(*words: object, **how: Any) -> tuple[int, str, str]:
    """Start one and wait for its end."""
    return ends_of(start(*words, **how))[0]


def output(*words: object, **how: Any) -> str:
    """Of one that ends well."""
    status, out, errors = run(*words, **how)
    assert status == 0, errors
    return out
