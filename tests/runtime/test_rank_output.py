"""A line that the launcher's output could not encode ended the thread that prints, and so the rank waited for
ever, as nobody emptied its pipe."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeloom.runtime import launch as processes
from pipeloom.runtime.launch import Processes

SCRIPT = """
import os, sys
from pipeloom.runtime.launch import launch

def work():
    if os.environ["RANK"] == "1":
        sys.stdout.buffer.write(bytes.fromhex(sys.argv[1]) + b"\\n")
        for _ in range(3000):  # more than a pipe holds
            sys.stdout.buffer.write(b"x" * 60 + b"\\n")
        sys.stdout.buffer.write(b"done\\n")

def loud():
    raise ValueError("caf\\u00e9 \\u2713")

if __name__ == "__main__":
    sys.exit(launch(loud if len(sys.argv) > 2 else work, 2))
"""


def launched(tmp_path: Path, encoding: str, *args: str) -> subprocess.CompletedProcess[bytes]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("sys.argv[1]", repr(args[0])))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": encoding}
    return subprocess.run([sys.executable, script, *args], env=env, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    ("encoding", "said", "seen"),
    [
        ("latin-1", "café".encode("latin-1"), "café".encode("latin-1")),
        ("utf-8", "café".encode(), "café".encode()),
        ("utf-8", "café".encode("latin-1"), b"caf\\xe9"),
        ("ascii", "café".encode("latin-1"), b"caf\\xe9"),
    ],
)
def test_all_that_ranks_say_is_read(tmp_path: Path, encoding: str, said: bytes, seen: bytes) -> None:
    done = launched(tmp_path, encoding, said.hex())
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(lines)) == (0, b"", 3002)
    assert lines[0] == b"[rank 1] " + seen and lines[-1] == b"[rank 1] done"


def test_why_a_rank_failed_is_said_as_far_as_it_can_be(tmp_path: Path) -> None:
    done = launched(tmp_path, "ascii", "", "loud")
    assert done.returncode == 1 and done.stderr.endswith(b"ValueError: caf\\xe9 \\u2713\n")


def test_a_pipe_is_read_to_its_end_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise ValueError("I/O operation on closed file")

    class Pipe(io.BytesIO):
        def close(self) -> None:
            closed_at.append(self.tell())
            super().close()

    raised: list[object] = []
    closed_at: list[int] = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: raised.append(hook.exc_value))
    ranks = Processes(pickle.dumps((bool, ())))
    ranks._print(Pipe(b"one\ntwo\nthree\n"), Closed(), 1)
    ranks._printers[0].join()
    assert closed_at == [14] and isinstance(raised[0], ValueError)
    ranks.stop()


def test_streams_without_an_encoding_take_anything() -> None:
    out = io.StringIO()
    processes._write(out, "café ✓\n")
    assert out.getvalue() == "café ✓\n"
