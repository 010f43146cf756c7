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
from typing import NamedTuple, Protocol

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented names

from .rank_status import FINISHED, SILENT_S, RankStatus, who_waits
from .store_calls import Store, StoreCalls

PATIENCE_S = 3.0
"""How long what can do without the store's answer waits for it."""

FOLLOWED = 8
"""How many ranks' postings each rank reads at every exchange."""

_AWAY = "its machine is down or out of reach"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong.

    rank: who failed; None if it cannot be known.
    summary: one line, such as "ValueError: boom".
    traceback: the text that Python prints; empty if the rank left none.
    found_by: the rank that noticed, if the one that failed could not say so itself.
    table: what that rank then knew of who waits for whom.
    """

    rank: int | None
    summary: str
    traceback: str = ""
    found_by: int | None = None
    table: str = ""

    @property
    def who(self) -> str:
        return "another rank" if self.rank is None else f"rank {self.rank}"


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

    Whoever serves the store may be frozen or out of reach. So every call on it is made by a further thread,
    on a connection of its own, and every method here ends within a limit, with what is known by then.

        pipeloom-watch-R   every interval: asks for one exchange, and waits for it at most `lost_s`
        pipeloom-store-R   makes all calls on the store, one after the other
        any thread         `announce`, `statuses`, ... wait for their calls at most `PATIENCE_S`

    Keys, below `name`:  failure    JSON of the first `Failure`; set once, by compare_set
                         state/R    JSON of rank R's last `RankStatus`, rewritten every `interval_s`

    name: the same on all ranks, and different for each board on one store.
    interval_s: between two exchanges.
    lost_s: a rank whose postings stop for so long has failed, and so has a store that does not answer for so
        long. Each rank watches the next one, and keeps up with `FOLLOWED` others in turn, so the store gets a
        dozen calls per rank and interval, however many ranks there are.
    server: the rank that serves the store, if it is one of them.
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
        server: int | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.failure: Failure | None = None
        self._calls = StoreCalls(lambda: _own_connection(store), name=f"pipeloom-store-{rank}")
        self._name = name
        self._interval_s = interval_s
        self._lost_s = lost_s
        self._patience_s = min(PATIENCE_S, lost_s)
        self._server = server
        self._beat = 0
        self._next = 0
        self._heard: dict[int, _Heard] = {}
        self._exchanged_s = time.monotonic()
        self._stopped = threading.Event()
        self._own_status: Callable[[], RankStatus] = RankStatus
        self._thread: threading.Thread | None = None

    def start(self, status: Callable[[], RankStatus], on_failure: Callable[[Failure], None]) -> None:
        self._own_status = status
        self._try(self._post_status)
        self._thread = threading.Thread(
            target=self._run, args=(on_failure,), name=f"pipeloom-watch-{self.rank}", daemon=True
        )
        self._thread.start()

    def announce(self, failure: Failure) -> Failure:
        mine = msgspec.json.encode(failure)

        def post(store: Store) -> bytes:  # sets it if it is empty, and says what it is now: the first wins
            return store.compare_set(self._key("failure"), "", mine.decode())

        try:
            first = self._calls.call(post, self._patience_s, keep=True)
        except (dist.DistError, TimeoutError):
            first = mine  # nobody can be told; what happened here is still the cause
        if self.failure is None:
            self.failure = failure if first == mine else msgspec.json.decode(first, type=Failure)
        return self.failure

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        end = time.monotonic() + timeout_s
        while self.failure is None and (left_s := end - time.monotonic()) > 0:
            try:
                self._calls.call(self._read_failure, left_s)
            except TimeoutError:
                break
            except dist.DistError as error:
                self.failure = self.failure or self._store_gone(error)
            if self.failure is None:
                self._stopped.wait(0.05)
        return self.failure

    def statuses(self) -> list[RankStatus | None]:
        """What each rank last posted, as far as it can be known within `PATIENCE_S`."""

        def post_and_read(store: Store) -> None:
            self._post_status(store)
            for rank in range(self.ranks):
                self._read_status(store, rank)

        self._try(post_and_read)
        return self._known()

    def _known(self) -> list[RankStatus | None]:
        now = time.monotonic()
        known: list[RankStatus | None] = [
            replace(heard.status, silent_s=now - heard.at_s) if heard else None
            for heard in map(self._heard.get, range(self.ranks))
        ]
        if self._thread is not None:
            known[self.rank] = self._own_status()  # also where the store does not get to know it
        return known

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._interval_s + 1)
        # Whoever serves the store waits for this last word, so it is worth waiting for.
        self._try(self._post_status, self._lost_s if self.failure is None else self._patience_s)
        self._calls.close()

    def _run(self, on_failure: Callable[[Failure], None]) -> None:
        while not self._stopped.is_set():
            if self.failure is None:
                self._exchange()
            if self.failure is not None:
                on_failure(self.failure)
                return
            self._stopped.wait(self._interval_s)

    def _exchange(self) -> None:
        begin_s = time.monotonic()
        pause_s = begin_s - self._exchanged_s - self._interval_s
        if pause_s > SILENT_S:
            # This rank was frozen itself, or the store was: others may have posted without being heard.
            self._heard = {r: h._replace(at_s=h.at_s + pause_s) for r, h in self._heard.items()}
        self._exchanged_s = begin_s
        try:
            self._calls.call(self._read_and_post, self._lost_s)
        except dist.DistError as error:
            self.failure = self.failure or self._store_gone(error)
        except TimeoutError:
            if not self._stopped.is_set():
                self.failure = self.failure or self._store_silent()
        if self.failure is None and (lost := self._lost_neighbour()) is not None:
            self.announce(replace(lost, table=who_waits(self.statuses())))

    def _read_and_post(self, store: Store) -> None:
        self._read_failure(store)
        if self.failure is not None:
            return
        self._post_status(store)
        followed = {(self.rank + 1) % self.ranks}
        while len(followed) < min(FOLLOWED, self.ranks):
            followed.add(self._next)
            self._next = (self._next + 1) % self.ranks
        for rank in followed:
            self._read_status(store, rank)

    def _read_failure(self, store: Store) -> None:
        # `Store.get` blocks until a key is there, hence a `check` in front of each.
        text = store.get(self._key("failure")) if store.check([self._key("failure")]) else b""
        if text and self.failure is None:
            self.failure = msgspec.json.decode(text, type=Failure)

    def _post_status(self, store: Store) -> None:
        self._beat += 1
        text = msgspec.json.encode(replace(self._own_status(), beat=self._beat))
        store.set(self._key(f"state/{self.rank}"), text.decode())

    def _read_status(self, store: Store, rank: int) -> None:
        key = self._key(f"state/{rank}")
        if rank not in self._heard and not store.check([key]):
            return
        status = msgspec.json.decode(store.get(key), type=RankStatus)
        before = self._heard.get(rank)
        if before is None or before.status.beat != status.beat:
            self._heard[rank] = _Heard(status, time.monotonic())

    def _lost_neighbour(self) -> Failure | None:
        """The failure of the next rank, if it has posted nothing for `lost_s`.

        Beats are compared, not times: the clocks of two machines differ.
        """
        peer = (self.rank + 1) % self.ranks
        heard = self._heard.get(peer)
        if peer == self.rank or heard is None or heard.status.doing == FINISHED:
            return None
        if time.monotonic() - heard.at_s <= self._lost_s:
            return None
        return self._found(
            peer, f"no sign of life for {self._lost_s:g} s: it was killed or is frozen, or {_AWAY}"
        )

    def _store_gone(self, error: dist.DistError) -> Failure:
        reason = str(error).splitlines()[0]
        return self._found(self._server, f"the store that joins the ranks cannot be reached: {reason}")

    def _store_silent(self) -> Failure:
        what = "the store that joins the ranks" + ("" if self._server is None else ", which it serves,")
        why = f"whoever serves it is frozen, or {_AWAY}"
        return self._found(self._server, f"{what} has not answered for {self._lost_s:g} s: {why}")

    def _found(self, rank: int | None, summary: str) -> Failure:
        return Failure(rank=rank, summary=summary, found_by=self.rank, table=who_waits(self._known()))

    def _try(self, use: Callable[[Store], object], limit_s: float | None = None) -> None:
        """Call the store if it answers; what can be done without it goes on."""
        try:
            self._calls.call(use, self._patience_s if limit_s is None else limit_s)
        except (dist.DistError, TimeoutError):
            pass  # the side thread finds it, too, and says so

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"


class _Heard(NamedTuple):
    """A rank's last posting, and when this rank first saw it (time.monotonic)."""

    status: RankStatus
    at_s: float


def _own_connection(store: Store) -> Store:
    """A second connection to the same store; stores without connections are used as they are."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        limit = timedelta(seconds=10)
        return TCPStore(store.host, store.port, is_master=False, timeout=limit, wait_for_workers=False)
    return store
