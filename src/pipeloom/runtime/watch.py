"""One rank's failure ends all ranks, and a wait that lasts too long says who waits for whom.

Each rank keeps a `Watch`. It posts what the rank does, so that any rank can print the table below; it
learns of the first failure anywhere and makes the waits of this rank end with a `PeerError` that carries
the failing rank's traceback.

    rank 0 waited 2 s for 1SEND_B0>0 from rank 1
    rank  does  waits for
    0     0B0   1SEND_B0>0 from rank 1, for 2.0 s
    1     1F1   0SEND_F1>1 from rank 0, for 2.0 s
    rank 0 -> rank 1 -> rank 0: they wait for each other
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, TypeVar

from ..ir.errors import CommunicationError, PeerError, PipeloomError
from ..ir.text import as_utf8
from .board import FINISHED, Board, Failure, RankStatus, waiting_circle, who_waits
from .child import PEER_FAILED
from .flight_recorder import write_recorded

T = TypeVar("T")

LINGER_S = 1.5
"""Time that the process of the store stays after a failure, so that all others can learn of it."""

STUCK_S = 10.0
"""Who waits for a rank so long after it has finished its work waits in vain."""

YIELD_S = 1.0
"""Time that a rank stays after another one's failure: torchrun ends all ranks once one has ended, and the
one that failed has yet to print its traceback."""


UNCAUGHT: list[BaseException] = []
"""The error that the script ended with, if any; `shorten_peer_errors` notes it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait in progress, of the main thread or of a device: for what, on which ranks, since when
    (time.monotonic), and what the rank does there."""

    what: str
    ranks: tuple[int, ...]
    since_s: float
    doing: str


class Watch:
    """Follows this rank and its peers; use it as a context manager around all work of a rank.

    status: what the rank does now, such as "2F5"; set it as often as you like, it is posted by a side thread.
    waiting: what the main thread waits for now.
    device_waits: gives what this rank's device waits for: its main thread is far ahead and waits for nothing.
    exit_after_s: if the main thread has not noticed a failure so long after it became known, the process
        ends hard: it is stuck where no exception can reach it. None: the ranks are threads of one process.
    hosts_store: whether the board's store ends with this process, which then leaves last.
    cause_timeout_s: how long to wait for the cause of a broken connection to be posted.

    What happens when rank 1 fails, by thread:

        rank 1, main     error leaves `with watch:` ─ fail ─ board.announce ─ linger ─ traceback, exit
        rank 0, side     board learns of it (polls) ─ _failure_known ─ interrupt: ends blocked waits
        rank 0, main     ... blocked in wait ──────────────────────────▶ ConnectionError ─ PeerError ─ exit
        rank 0, side     if the main thread does not come back within exit_after_s: os._exit
    """

    def __init__(
        self,
        board: Board,
        *,
        exit_after_s: float | None = None,
        hosts_store: bool = False,
        cause_timeout_s: float = 3.0,
    ) -> None:
        self.status = ""
        self._board = board
        self._exit_after_s = exit_after_s
        self._hosts_store = hosts_store
        self._cause_timeout_s = cause_timeout_s
        self.waiting: Waiting | None = None
        self.device_waits: Callable[[], Waiting | None] = lambda: None
        self._main_knows = threading.Event()
        self._left = False
        self._recorded = threading.Lock()
        self._on_failure: list[Callable[[], None]] = []
        self._on_exit: list[Callable[[], None]] = []
        self._ctrl_c = CtrlC(lambda: self.waiting is not None, self._interrupt)

    @property
    def rank(self) -> int:
        return self._board.rank

    @property
    def ranks(self) -> int:
        return self._board.ranks

    def __enter__(self) -> Watch:
        self._left = False
        self._board.start(self._own_status, self._failure_known)
        if self._exit_after_s is not None:
            shorten_peer_errors()
            self._ctrl_c.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._left:
            return
        try:
            if error is None or _is_clean_exit(error):
                self._finish()
            elif not isinstance(error, PeerError):
                self.fail(error)
        finally:
            self._left = True
            self._main_knows.set()
            if self._board.failure is not None:
                self._interrupt()
            with ExitStack() as ended:  # calls each, last one first, whatever another raises
                for end in (self._ctrl_c.stop, self._board.stop, self._linger, *self._on_exit):
                    ended.callback(end)

    def check(self) -> None:
        """Raises: PeerError if another rank failed; PipeloomError if this one has left the others. Cheap."""
        failure = self._board.failure
        if failure is not None:
            self._main_knows.set()
            raise peer_error(failure, self.rank)
        if self._left:
            raise PipeloomError(
                f"the pipeline of rank {self.rank} was closed",
                hint="call this before close(), or inside the with",
            )

    def fail(self, error: BaseException, *, main_thread: bool = True) -> Failure:
        """Tell all ranks that this one failed; returns the first failure, which may be another rank's.

        main_thread: whether it is the main thread that calls, which then knows.
        """
        if main_thread:
            self._main_knows.set()
        if isinstance(error, PeerError) and self._board.failure is not None:
            return self._board.failure
        summary = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
        text = "".join(traceback.format_exception(error))
        hung = isinstance(error, CommunicationError)
        failure = self._board.announce(
            Failure(rank=self.rank, summary=as_utf8(summary), traceback=as_utf8(text), hung=hung)
        )
        self._write_recorded(failure)
        return failure

    def on_failure(self, interrupt: Callable[[], None]) -> None:
        """Call `interrupt` from another thread when a failure becomes known: it must end blocked waits."""
        self._on_failure.append(interrupt)

    def on_exit(self, leave: Callable[[], None]) -> None:
        """Call `leave` when the watch ends, last one first."""
        self._on_exit.append(leave)

    def wait(self, what: str, ranks: tuple[int, ...], block: Callable[[], None]) -> None:
        """Run `block`, which waits for `what`, such as "0SEND_F2>1 from rank 0"; `ranks` must bring it about.

        block: raises TimeoutError when its time limit passes, ConnectionError when it cannot succeed.
        Raises: PeerError if another rank failed; CommunicationError with the table of who waits for whom
            if the time passed, or if a connection ended and no rank says why.
        """
        self.check()
        self.waiting = waiting = Waiting(what, ranks, time.monotonic(), self.status)
        try:
            block()
        except TimeoutError:
            self._raise_first(self.timeout_error(what, time.monotonic() - waiting.since_s))
        except ConnectionError as error:
            self._raise_disconnected(waiting, str(error))
        except Exception:
            self.waiting = None
            raise
        self.waiting = None

    def gather(self, text: str, timeout_s: float) -> list[str]:
        """One short text from every rank, in rank order, by the store: no device takes part.

        All ranks call it equally often. Raises: as `wait`, for the ranks whose text does not come.
        """
        texts: list[str] = []
        others = tuple(rank for rank in range(self.ranks) if rank != self.rank)
        self.wait("a word from all ranks", others, lambda: texts.extend(self._board.gather(text, timeout_s)))
        return texts

    def timeout_error(self, what: str, waited_s: float) -> CommunicationError:
        """The error of a wait that lasted too long, with the table over all ranks."""
        statuses = self._board.statuses()
        silent = tuple(r for r, status in enumerate(statuses) if status is not None and status.is_silent)
        hint = "look at the rank that does not wait; raise the time limit if it only is slow"
        if waiting_circle(statuses):
            hint = "let all ranks make the same calls in the same order: perhaps one has had fewer batches"
        if silent:
            hint = f"see whether {_listed(silent)} was killed or frozen, or its machine is out of reach"
        return CommunicationError(
            f"rank {self.rank} waited {waited_s:.3g} s for {what}\n{who_waits(statuses)}", hint=hint
        )

    def _raise_disconnected(self, waiting: Waiting, reason: str) -> NoReturn:
        # A rank that fails posts the cause before its connections end, so it is there or will soon be.
        failure = self._board.wait_for_failure(self._cause_timeout_s)
        if failure is not None and failure.rank != self.rank:
            self._main_knows.set()
            raise peer_error(failure, self.rank) from None
        statuses = self._board.statuses()
        silent = tuple(r for r in waiting.ranks if (status := statuses[r]) is not None and status.is_silent)
        lost = f"rank {self.rank} lost its connection while it waited for {waiting.what}"
        if len(silent) == 1:
            summary = f"no sign of life since {lost}: it was killed, or its machine is down"
            found = Failure(rank=silent[0], summary=summary, found_by=self.rank, table=who_waits(statuses))
            raise peer_error(self._board.announce(found), self.rank) from None
        hint = f"see whether {_listed(silent or waiting.ranks)} was killed, for instance for want of memory"
        if done := [r for r in waiting.ranks if (status := statuses[r]) and status.doing == FINISHED]:
            hint = f"rank {done[0]} has closed its pipeline already: let all ranks make the same calls"
        self._raise_first(CommunicationError(f"{lost}, and no rank said why: {reason}", hint=hint))

    def _raise_first(self, error: CommunicationError) -> NoReturn:
        """Several ranks often notice the same trouble: the first one's words count. Users see
        one error, and not the transport's behind it."""
        failure = self.fail(error)
        raise (peer_error(failure, self.rank) if failure.rank != self.rank else error) from None

    def _finish(self) -> None:
        """The store must not go before its last user."""
        self.status = FINISHED
        if self._hosts_store:
            others = tuple(rank for rank in range(self.ranks) if rank != self.rank)
            self.wait("the end of its work", others, lambda: self._await_finished(others))

    def _await_finished(self, others: tuple[int, ...]) -> None:
        stuck_s = time.monotonic() + STUCK_S
        while True:
            statuses = self._board.statuses()
            left = {r for r in others if (status := statuses[r]) is None or status.doing != FINISHED}
            if not left:
                return
            if time.monotonic() > stuck_s and left <= self._wait_in_vain(statuses):
                raise TimeoutError
            if self._board.wait_for_failure(0.1) is not None:
                raise ConnectionError("a rank failed")

    def _wait_in_vain(self, statuses: Sequence[RankStatus | None]) -> set[int]:
        """The ranks that wait for this one, which has finished, or for one of them: their scripts do not fit
        together."""
        waits_on = {
            r: set(status.waits_on)
            for r, status in enumerate(statuses)
            if status is not None and status.waiting_s > STUCK_S and not status.is_silent
        }
        vain: set[int] = set()
        while more := {r for r, on in waits_on.items() if on & {self.rank, *vain}} - vain:
            vain |= more
        return vain

    def _linger(self) -> None:
        failure = self._board.failure
        if failure is None or self._exit_after_s is None:
            return
        if self._hosts_store:
            time.sleep(LINGER_S)
        elif failure.rank != self.rank:
            time.sleep(YIELD_S)

    def _own_status(self) -> RankStatus:
        waiting = self.waiting
        if waiting is None and self.status != FINISHED:
            waiting = self.device_waits()
        if waiting is None:
            return RankStatus(doing=self.status)
        seconds = time.monotonic() - waiting.since_s
        return RankStatus(
            doing=waiting.doing, waits_for=waiting.what, waits_on=waiting.ranks, waiting_s=seconds
        )

    def _failure_known(self, failure: Failure) -> None:
        """Runs in a side thread. The clock of the hard end is another: what comes here may hang."""
        if self._exit_after_s is not None:
            given = failure, self._exit_after_s
            threading.Thread(target=self._end_unless_noticed, args=given, daemon=True).start()
        try:
            self._write_recorded(failure)
        finally:
            self._interrupt()

    def _end_unless_noticed(self, failure: Failure, after_s: float) -> None:
        if not self._main_knows.wait(after_s):
            print(
                f"pipeloom: rank {self.rank} ends hard, as it did not notice for {after_s:g} s "
                f"that {_in_short(peer_error(failure, self.rank))}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(PEER_FAILED)

    def _write_recorded(self, failure: Failure) -> None:
        """Once, and before anything that hangs is ended."""
        if not failure.hung or self._exit_after_s is None or not self._recorded.acquire(blocking=False):
            return
        if file := write_recorded(self.rank):
            print(
                f"pipeloom: what PyTorch's flight recorder has of rank {self.rank} is in {file}",
                file=sys.stderr,
                flush=True,
            )

    def _interrupt(self) -> None:
        for interrupt in self._on_failure:
            interrupt()


CTRL_C_S = 0.2
"""Time for the main thread to come back by itself after Ctrl-C."""


class CtrlC:
    """While started, ends waits of the main thread in C++ code when SIGINT comes.

    Python handles a signal once its main thread is back in Python code, which a blocked wait is not. The part
    of the handling that happens at once is a byte written to the wake-up descriptor; a side thread reads it
    and ends the wait, so that the main thread gets its KeyboardInterrupt.

    blocked: whether the main thread waits.  interrupt: ends that wait; called from another thread.
    Does nothing if SIGINT has a handler of the user's, who may want to go on; if something else uses the
    wake-up descriptor, as asyncio does; or outside the main thread.
    """

    def __init__(self, blocked: Callable[[], bool], interrupt: Callable[[], None]) -> None:
        self._blocked = blocked
        self._interrupt = interrupt
        self._write: int | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._write = write
        self._thread = threading.Thread(target=self._run, args=(read,), name="pipeloom-ctrl-c", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._write is None or self._thread is None:
            return
        signal.set_wakeup_fd(-1)
        os.close(self._write)
        self._write = None
        self._thread.join(timeout=2.0)

    def _run(self, read: int) -> None:
        while numbers := os.read(read, 64):
            usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if signal.SIGINT in numbers and usual and self._blocked():
                time.sleep(CTRL_C_S)
                if self._blocked():
                    self._interrupt()
        os.close(read)


class FoundPeerError(PeerError):
    """On the rank that noticed another one's failure, which could not say so itself."""


def peer_error(failure: Failure, rank: int) -> PeerError:
    """The error for a rank that did not fail, with the failing rank's traceback, or who waited for whom."""
    kind = FoundPeerError if failure.found_by == rank else PeerError
    text = failure.summary if failure.rank is None else f"rank {failure.rank} failed: {failure.summary}"
    return kind(f"{text}\n{failure.traceback or failure.table}".rstrip())


def _in_short(error: BaseException) -> str:
    """Its first line, as the failing rank prints the rest; all of it on the rank that noticed for another."""
    return str(error) if isinstance(error, FoundPeerError) else str(error).splitlines()[0]


def _is_clean_exit(error: BaseException) -> bool:
    """Whether it is `sys.exit()` without a code, or with 0: the rank has finished its work."""
    return isinstance(error, SystemExit) and not error.code


def shorten_peer_errors() -> None:
    """Let an uncaught PeerError print one line: the failing rank prints its traceback itself, once.

    Any uncaught error is noted in `UNCAUGHT`. `sys.last_value` would not do: IPython and pytest set it for
    errors that they handle.
    """
    previous = sys.excepthook
    if getattr(previous, "shortens_peer_errors", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        UNCAUGHT[:] = [error]
        if issubclass(kind, PeerError):
            print(f"pipeloom: this rank ends because {_in_short(error)}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    hook.shortens_peer_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _listed(ranks: tuple[int, ...]) -> str:
    """The ranks in words: "rank 3", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks))
