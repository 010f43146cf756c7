"""Where ranks post what they do and learn that another one failed.

Two boards with one face: `LocalBoard` for the threads of one process and `StoreBoard` on a torch.distributed
store. The first failure wins: whoever posts later gets to know the earlier one, so that all ranks name the
same cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Protocol

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented names

FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong.

    rank: who failed; None if it cannot be known.
    summary: one line, such as "ValueError: boom".
    traceback: the text that Python prints; empty if the rank left none.
    """

    rank: int | None
    summary: str
    traceback: str = ""

    @property
    def who(self) -> str:
        return "another rank" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank does, as it last posted it.

    doing: the action it is at, such as "2F5".
    waits_for: what it waits for, such as "0SEND_F2>1 from rank 0"; empty while it does not wait.
    waits_on: the ranks that must bring it about.  waiting_s: seconds it has waited.
    beat: counts its postings.
    """

    doing: str = ""
    waits_for: str = ""
    waits_on: tuple[int, ...] = ()
    waiting_s: float = 0.0
    beat: int = 0


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...


class Noticeboard(Protocol):
    """One rank's access to the board."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def failure(self) -> Failure | None:
        """The first failure as far as it is known here; costs nothing to ask."""

    def start(self, status: Callable[[], RankStatus], on_failure: Callable[[Failure], None]) -> None:
        """Post `status()` from now on; call `on_failure` once when a failure becomes known."""

    def announce(self, failure: Failure) -> Failure:
        """Post a failure; returns the first one, which may be another rank's."""

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        """The failure, as soon as it is known; None if there is none within the time."""

    def statuses(self) -> list[RankStatus | None]:
        """What each rank last posted; None for a rank that has not posted yet."""

    def stop(self) -> None:
        """Leave the board; others see what was posted last."""


@dataclass
class _Shared:
    """What the boards of one process share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    failure: Failure | None = None
    statuses: dict[int, Callable[[], RankStatus]] = field(default_factory=dict)
    listeners: list[Callable[[Failure], None]] = field(default_factory=list)


class LocalBoard:
    """The board of one thread; `local_boards` makes those of all ranks."""

    def __init__(self, rank: int, ranks: int, shared: _Shared) -> None:
        self.rank = rank
        self.ranks = ranks
        self._shared = shared

    @property
    def failure(self) -> Failure | None:
        return self._shared.failure

    def start(self, status: Callable[[], RankStatus], on_failure: Callable[[Failure], None]) -> None:
        with self._shared.changed:
            self._shared.statuses[self.rank] = status
            self._shared.listeners.append(on_failure)

    def announce(self, failure: Failure) -> Failure:
        with self._shared.changed:
            if self._shared.failure is not None:
                return self._shared.failure
            self._shared.failure = failure
            listeners = list(self._shared.listeners)
            self._shared.changed.notify_all()
        for on_failure in listeners:
            on_failure(failure)
        return failure

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.failure is not None, timeout_s)
            return self._shared.failure

    def statuses(self) -> list[RankStatus | None]:
        with self._shared.changed:
            status_of = dict(self._shared.statuses)
        return [status_of[r]() if r in status_of else None for r in range(self.ranks)]

    def stop(self) -> None:
        """Nothing to do: the statuses stay readable."""


def local_boards(ranks: int) -> list[LocalBoard]:
    """One board per thread, for ranks 0 to `ranks` - 1."""
    shared = _Shared()
    return [LocalBoard(rank, ranks, shared) for rank in range(ranks)]


class StoreBoard:
    """A board on a torch.distributed store, kept up to date by a side thread.

    The thread has its own connection to the store, as a blocking call holds a connection; this class makes
    only calls that return at once. So it never waits for a rank that has died, and can always be stopped:
    `Store.get` and `wait` block until a key is there, hence a `check` before each `get`.

    Keys, below `name`:  failure    JSON of the first `Failure`; set once, by compare_set
                         state/R    JSON of rank R's last `RankStatus`, rewritten every `interval_s`

    name: the same on all ranks, and different for each board on one store.
    interval_s: between two postings.
    lost_s: a rank whose postings stop for so long has failed. Each rank watches the next one, so the store
        gets three calls per rank and interval, however many ranks there are.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        *,
        name: str = "pipeloom/watch",
        interval_s: float = 0.5,
        lost_s: float = 60.0,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.failure: Failure | None = None
        self._store = _own_connection(store)
        self._name = name
        self._interval_s = interval_s
        self._lost_s = lost_s
        self._beat = 0
        self._neighbour_beat = (0, time.monotonic())
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._own_status: Callable[[], RankStatus] = RankStatus
        self._thread: threading.Thread | None = None

    def start(self, status: Callable[[], RankStatus], on_failure: Callable[[Failure], None]) -> None:
        self._own_status = status
        self._post_status()
        self._thread = threading.Thread(
            target=self._run, args=(on_failure,), name=f"pipeloom-watch-{self.rank}", daemon=True
        )
        self._thread.start()

    def announce(self, failure: Failure) -> Failure:
        mine = msgspec.json.encode(failure)
        try:
            with self._lock:  # sets it if it is empty, and says what it is now: the first failure wins
                first = self._store.compare_set(self._key("failure"), "", mine.decode())
        except dist.DistError:
            first = mine  # nobody can be told; what happened here is still the cause
        if self.failure is None:
            self.failure = failure if first == mine else msgspec.json.decode(first, type=Failure)
        return self.failure

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        end = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < end:
            self._read_failure()
            if self.failure is None:
                self._stopped.wait(0.05)
        return self.failure

    def statuses(self) -> list[RankStatus | None]:
        try:
            self._post_status()
            return [self._read_status(rank) for rank in range(self.ranks)]
        except dist.DistError:
            return [None] * self.ranks

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._interval_s + 1)
        try:
            self._post_status()
        except dist.DistError:
            pass  # the store may go before its last user does

    def _run(self, on_failure: Callable[[Failure], None]) -> None:
        while not self._stopped.is_set():
            if self.failure is None:
                self._exchange()
            if self.failure is not None:
                on_failure(self.failure)
                return
            self._stopped.wait(self._interval_s)

    def _exchange(self) -> None:
        self._read_failure()
        if self.failure is not None:
            return
        try:
            self._post_status()
            lost = self._lost_neighbour()
        except dist.DistError as error:
            self.failure = self._store_gone(error)
            return
        if lost is not None:
            self.announce(lost)

    def _read_failure(self) -> None:
        try:
            with self._lock:
                posted = self._store.check([self._key("failure")])
                text = self._store.get(self._key("failure")) if posted else b""
        except dist.DistError as error:
            self.failure = self.failure or self._store_gone(error)
            return
        if text and self.failure is None:
            self.failure = msgspec.json.decode(text, type=Failure)

    def _post_status(self) -> None:
        with self._lock:
            self._beat += 1
            text = msgspec.json.encode(replace(self._own_status(), beat=self._beat))
            self._store.set(self._key(f"state/{self.rank}"), text.decode())

    def _read_status(self, rank: int) -> RankStatus | None:
        key = self._key(f"state/{rank}")
        with self._lock:
            if not self._store.check([key]):
                return None
            return msgspec.json.decode(self._store.get(key), type=RankStatus)

    def _lost_neighbour(self) -> Failure | None:
        """The failure of the next rank, if it has posted nothing for `lost_s`.

        Beats are compared, not times: the clocks of two machines differ.
        """
        peer = (self.rank + 1) % self.ranks
        status = None if peer == self.rank else self._read_status(peer)
        if status is None or status.doing == FINISHED:
            return None
        beat, since = self._neighbour_beat
        if status.beat != beat:
            self._neighbour_beat = (status.beat, time.monotonic())
        elif time.monotonic() - since > self._lost_s:
            summary = f"no sign of life for {self._lost_s:g} s: it was killed, or its machine is down"
            return Failure(rank=peer, summary=summary)
        return None

    def _store_gone(self, error: dist.DistError) -> Failure:
        reason = str(error).splitlines()[0]
        return Failure(rank=None, summary=f"the store that joins the ranks cannot be reached: {reason}")

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"


def _own_connection(store: Store) -> Store:
    """A second connection to the same store; stores without connections are used as they are."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        limit = timedelta(seconds=10)
        return TCPStore(store.host, store.port, is_master=False, timeout=limit, wait_for_workers=False)
    return store
