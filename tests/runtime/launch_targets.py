"""What the launched processes of test_launch.py run. Imports no torch, so they start fast."""

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOREVER_S = 600


def say(folder: str) -> None:
    """Note this process, and prove what environment it sees."""
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))


def say_and_fail(folder: str) -> None:
    say(folder)
    raise RuntimeError("nobody is to hear of this before the work has met it, too")


def environment() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "GLIBC_TUNABLES")
    print(" ".join(os.environ.get(name, "-") for name in names), "torch" in sys.modules)
    print("to stderr", file=sys.stderr)


def talk(folder: str) -> None:
    """Say much, and note the end."""
    for number in range(20_000):
        print("line", number)
    say(folder)


def sleep(folder: str) -> None:
    """Sleep, and have a child that sleeps too."""
    helper = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
    Path(folder, f"helper{os.environ['RANK']}").write_text(str(helper.pid))
    say(folder)
    time.sleep(FOREVER_S)


def stubborn(folder: str) -> None:
    """Ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep(folder)


def fail_on_1(folder: str) -> None:
    """Rank 1 fails once rank 0 is there, which would run forever and ignores SIGTERM."""
    if os.environ["RANK"] != "1":
        stubborn(folder)
    note = Path(folder, "0")
    while not (note.exists() and note.read_text()):
        time.sleep(0.02)
    raise ValueError("boom")


def exit_with(code: object) -> None:
    if os.environ["RANK"] == "1":
        sys.exit(code)


def fail_late() -> None:
    """All is well until the interpreter shuts down."""
    if os.environ["RANK"] == "1":
        atexit.register(os._exit, 5)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else time.sleep(FOREVER_S)


def says_much() -> None:
    """More than a pipe holds, and bytes that are no UTF-8."""
    if os.environ["RANK"] == "1":
        for line in (b"caf\xe9", *[b"x" * 60] * 3000, b"done"):
            sys.stdout.buffer.write(line + b"\n")


class _Unloadable:
    """A target whose unpickling fails."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise RuntimeError('cannot be loaded')",)


UNLOADABLE = _Unloadable()
