"""Starting the ranks of one machine, and ending them together.

However it ends, no process stays: a failing rank, Ctrl-C and SIGTERM end all ranks from here, and if this
process itself is killed, each rank ends itself (`child.py`). Nothing here imports torch before the ranks have
started.
"""

from __future__ import annotations

import os
import pickle
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, TextIO, TypeAlias

import msgspec

from ..ir.errors import ConfigError
from .allocator import with_huge_pages
from .child import PEER_FAILED, RankExit

HOST = "127.0.0.1"

GRACE_S = 5.0
"""After a rank failed, the others get so long to end by themselves; with `TERM_S` it stays below 10 s."""

KILLED_GRACE_S = 1.0
"""The same after a rank was killed: it told the others nothing that they would have to pass on."""

POLL_S = 0.05
"""How often ended processes are looked for; what they say before is heard at once."""

TERM_S = 2.0
"""Then they get SIGTERM, and so long to end, and then SIGKILL."""


Handler: TypeAlias = Callable[[int, FrameType | None], None] | signal.Handlers


@dataclass
class _Rank:
    """One process. report: pipe on which it says how it ends."""

    rank: int
    process: subprocess.Popen[bytes]
    report: int
    report_text: bytes = b""
    ended: bool = False

    @property
    def outcome(self) -> RankExit | None:
        """What it reported, once the report is complete: a line of JSON."""
        complete = self.report_text.endswith(b"\n")
        return msgspec.json.decode(self.report_text, type=RankExit) if complete else None

    @property
    def killed(self) -> bool:
        """Whether a signal ended it, before it could say anything."""
        return self.outcome is None and (self.process.returncode or 0) < 0

    @property
    def status(self) -> int | None:
        """Exit status: a failure as soon as it is announced, success only once the process has ended."""
        if self.outcome is not None and self.outcome.status:
            return self.outcome.status
        code = self.process.returncode
        return code if code is None or code >= 0 else 128 - code

    def failure_text(self) -> str:
        """How it failed, for the user."""
        if self.outcome is not None and self.outcome.peer:
            return self.outcome.text
        if self.outcome is not None and self.outcome.text:
            return f"rank {self.rank} failed:\n{self.outcome.text.rstrip()}"
        code = self.process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            memory = " (perhaps the machine ran out of memory)" if name == "SIGKILL" else ""
            return f"rank {self.rank} was killed by {name}{memory}"
        return f"rank {self.rank} ended with exit status {self.status}"


def _send(rank: _Rank, data: bytes, *, last: bool = False) -> None:
    """Write to a rank's standard input. last: and close it."""
    pipe = rank.process.stdin
    assert pipe is not None
    if pipe.closed:
        return
    with suppress(BrokenPipeError):  # it ended before it read, and its exit status will say so
        pipe.write(data)
        pipe.flush()
    if last:
        with suppress(BrokenPipeError):
            pipe.close()


class Processes:
    """All ranks of this machine."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._printers: list[threading.Thread] = []
        self._printing = threading.Lock()
        self._selector = selectors.DefaultSelector()
        # Nobody ever writes here: ranks see that this pipe ends when this process does, however that happens.
        self._alive_read, self._alive_write = os.pipe()
        self._cause: _Rank | None = None
        self._stopped = False

    def start(self, rank: int, env: dict[str, str]) -> None:
        """Start one rank. On a terminal, rank 0 writes to it directly, so that its progress bar works."""
        report, report_write = os.pipe()
        out, err = (
            None if rank == 0 and stream.isatty() else subprocess.PIPE for stream in (sys.stdout, sys.stderr)
        )
        command = [sys.executable, "-P", "-m", "pipeloom.runtime.child"]
        process = subprocess.Popen(
            [*command, str(self._alive_read), str(report_write)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            env=env,
            pass_fds=(self._alive_read, report_write),
            start_new_session=True,  # so Ctrl-C reaches only us, and signals reach all that the rank started
        )
        os.close(report_write)
        os.set_blocking(report, False)
        started = _Rank(rank, process, report)
        self._ranks.append(started)
        self._selector.register(report, selectors.EVENT_READ, started)
        self._print(process.stdout, sys.stdout, rank)
        self._print(process.stderr, sys.stderr, rank)

    def send(self, message: object, *, last: bool = False) -> None:
        """Tell all ranks what `child.py` reads: a pickled function and arguments; or, last, their work."""
        for rank in self._ranks:
            _send(rank, pickle.dumps(message), last=last)

    def exit_if_one_failed(self) -> None:
        """Raises: SystemExit with the status of a rank that has failed, once what it died of is told."""
        for rank in self._ranks:
            self._listen(rank)
        if self._cause is not None:
            sys.exit(self._cause.status or 1)

    def wait(self) -> int:
        """Wait until all ranks have ended; tell what failed first.

        Returns: 0, or the exit status of the rank that failed first.
        """
        limit: float | None = None
        while not all(rank.ended for rank in self._ranks):
            self._selector.select(POLL_S)
            for rank in self._ranks:
                self._listen(rank)
            if limit is None and (failed := [rank for rank in self._ranks if rank.status]):
                killed = all(rank.killed for rank in failed)
                limit = time.monotonic() + (KILLED_GRACE_S if killed else GRACE_S)
            if limit is not None and time.monotonic() >= limit:
                break
        self.stop()
        # Ranks that end because of another one know why. That one, where it is frozen, was killed only here.
        failed = [rank for rank in self._ranks if rank.status]
        knowing = [rank for rank in failed if rank.outcome is not None and rank.outcome.peer]
        if self._cause is None and failed:
            self._print_cause((knowing or failed)[0])
        return 0 if self._cause is None else self._cause.status or 1

    def stop(self) -> None:
        """End all ranks that still run."""
        if self._stopped:
            return
        self._stopped = True
        with _handlers(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):  # no second Ctrl-C interrupts this
            running = [rank for rank in self._ranks if rank.process.poll() is None]
            self._signal(running, signal.SIGTERM)
            end = time.monotonic() + TERM_S
            while time.monotonic() < end and any(rank.process.poll() is None for rank in running):
                time.sleep(0.02)
            self._signal(self._ranks, signal.SIGKILL)  # also what an ended rank started and left behind
            for rank in self._ranks:
                rank.process.wait()
                _send(rank, b"", last=True)
                os.close(rank.report)
            for printer in self._printers:
                printer.join(timeout=5.0)
        self._selector.close()
        os.close(self._alive_read)
        os.close(self._alive_write)

    def _listen(self, rank: _Rank) -> None:
        """Take what a rank says, and notice whether it has ended.

        The end of the pipe would not tell: what a rank has started may hold it open.
        """
        if rank.ended:
            return
        ended = rank.process.poll() is not None
        with suppress(BlockingIOError):
            while text := os.read(rank.report, 1 << 16):
                rank.report_text += text
        if (ended or rank.outcome is not None) and rank.report in self._selector.get_map():
            # It is readable from now on in any case, so it would no longer wait for news.
            self._selector.unregister(rank.report)
        rank.ended = ended
        peer = rank.outcome is not None and rank.outcome.peer
        if self._cause is None and rank.status and rank.status != PEER_FAILED and not peer:
            self._print_cause(rank)

    def _print_cause(self, rank: _Rank) -> None:
        self._cause = rank
        with self._printing:
            _write(sys.stderr, f"{rank.failure_text()}\n")

    def _print(self, stream: IO[bytes] | None, out: TextIO, rank: int) -> None:
        """Print a rank's output as it comes, whole lines, those of ranks other than 0 with the rank."""
        if stream is None:
            return
        prefix = f"[rank {rank}] " if rank else ""

        def forward() -> None:
            try:
                for line in stream:
                    with self._printing:
                        _write(out, f"{prefix}{line.decode(_encoding(out), _ESCAPED)}")
            finally:  # a pipe that nobody reads would fill and hold up the rank
                for _ in stream:
                    pass
                stream.close()

        printer = threading.Thread(target=forward, name=f"pipeloom-print-{rank}", daemon=True)
        printer.start()
        self._printers.append(printer)

    def _signal(self, ranks: Sequence[_Rank], number: signal.Signals) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid, number)


_ESCAPED = "backslashreplace"
"""How Python's own standard error shows what it cannot."""


def _encoding(out: TextIO) -> str:
    """What a stream is written in; ranks, which inherit our environment, mostly write in the same."""
    return getattr(out, "encoding", None) or "utf-8"  # StringIO says None


def _write(out: TextIO, text: str) -> None:
    """Print at once. Where nobody reads any more (`| head -1`) or the disk is full, ranks go on unheard."""
    try:
        if getattr(out, "errors", None) in (None, "strict"):
            text = text.encode(_encoding(out), _ESCAPED).decode(_encoding(out))
        out.write(text)
        out.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), out.fileno())


@contextmanager
def terminate_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that clean-up runs."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    with _handlers(leave, signal.SIGTERM):
        yield


@contextmanager
def _handlers(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Set signal handlers for a while, or until others are set. Only the main thread can; elsewhere nothing
    changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, previous in before:
            if signal.getsignal(number) is handler:
                signal.signal(number, previous)


class LauncherStore:
    """Serves the store by which the ranks find each other, on a socket that already listens, from the first
    connection on. Were it a rank that served it, a frozen one would take away from all others what tells them
    of each other.

    Only then is torch imported, in a side thread: who launches needs none, and the ranks start at once.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pipeloom-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No rank needs it any more."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        store = None
        while not self._closed.is_set() and not select.select([self._listener], [], [], POLL_S)[0]:
            pass
        if not self._closed.is_set():
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # a documented name

            host, port = self._listener.getsockname()
            store = TCPStore(
                host,
                port,
                is_master=True,
                master_listen_fd=self._listener.detach(),  # which it closes
                wait_for_workers=False,
            )
            self._closed.wait()
        del store
        self._listener.close()


def launch(target: Callable[..., object], ranks: int, *, args: Sequence[object] = ()) -> int:
    """Run `target(*args)` in `ranks` new processes on this machine and wait until all have ended.

    After a rank has failed the others get 5 s to end by themselves, 1 s if a signal killed it, as it told
    them nothing to pass on; then SIGTERM and SIGKILL.

    target, args: must be picklable; a script that gives its own function needs the usual `__name__` guard.
    Returns: 0, or the exit status of the rank that failed first (128 + signal if it was killed). What that
        rank failed with has then been printed to standard error, once. What ranks other than 0 write is
        printed with the rank before each line.
    Raises: KeyboardInterrupt on Ctrl-C and SystemExit on SIGTERM, after all ranks have ended.
    """
    with StartedRanks(ranks) as started:
        return started.run(target, args)


class StartedRanks(ExitStack):
    """Processes of all ranks, started before it is known what they will run: importing torch and a model's
    library takes them seconds, in which the launching process plans. A context manager: where nothing is run
    in them, or that fails, they end with it. A rank that ends before it has work ends the launching process,
    too, by SystemExit, after it has told what the rank died of.

    needed: False where the launching process has something to give without them: a rank that ends early is
        then told of by `run` only.
    """

    def __init__(self, ranks: int, *, needed: bool = True) -> None:
        super().__init__()
        self.ranks = ranks
        with ExitStack() as stack:
            listener = socket.create_server((HOST, 0), backlog=1024)
            port = listener.getsockname()[1]
            stack.callback(LauncherStore(listener).close)
            stack.enter_context(terminate_as_exit())
            self._processes = Processes()
            stack.callback(self._processes.stop)
            for rank in range(ranks):
                self._processes.start(rank, _environment(rank, ranks, port))
            self._without_work = stack.enter_context(ExitStack())
            if needed:
                look = self._processes.exit_if_one_failed
                self._without_work.enter_context(_handlers(lambda *_: look(), signal.SIGCHLD))
            self.enter_context(stack.pop_all())

    def prepare(self, target: Callable[..., object], args: Sequence[object] = ()) -> None:
        """Let each rank call something picklable while it waits for its work. What that raises goes unsaid:
        the work is expected to meet the same again. Returns at once if the ranks are through with what they
        were to call before; else when they are."""
        self._processes.send(pickle.dumps((target, tuple(args))))

    def run(self, target: Callable[..., object], args: Sequence[object] = ()) -> int:
        """What `launch` does, in these processes, once."""
        self._without_work.close()
        work = _main_file(target), sys.path, pickle.dumps((target, tuple(args)))
        self._processes.send(work, last=True)
        return self._processes.wait()


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets, and defaults that the caller's own environment overrides."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    defaults = {
        # One thread per rank: the ranks of one machine share its cores.
        "OMP_NUM_THREADS": "1",
        # Errors come with our own words; torch's warnings about connections that end say the same at length.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # All ranks are on this machine, so nothing needs to be reachable from outside.
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),
    }
    return {
        **defaults,
        **os.environ,
        **with_huge_pages(os.environ.get("GLIBC_TUNABLES", "")),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank is to serve it
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        # Lines pass through this process, which prints them as they come.
        "PYTHONUNBUFFERED": "1",
    }


def _main_file(target: Callable[..., object]) -> str | None:
    """The running script, if the target is defined in it."""
    if getattr(target, "__module__", None) != "__main__":
        return None
    file: str | None = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise ConfigError(
            f"{target!r} is defined in an interactive session, which new processes cannot load",
            hint="put it into a file",
        )
    return os.path.abspath(file)
