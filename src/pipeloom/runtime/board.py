"""The board where ranks post what they do, and learn that another one failed.

It is a torch.distributed store: a TCPStore between processes, a HashStore between the threads of one. The
first failure wins: whoever posts later gets to know the earlier one, so that all ranks name the same cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # a documented name

from .one_thread import OneThread

T = TypeVar("T")

PATIENCE_S = 3.0
"""How long what can do without the store's answer waits for it."""

FOLLOWED = 8
"""How many ranks' postings each rank reads at every exchange."""

CLOSING_S = 1.0
"""How long `StoreCalls.close` waits for its thread, which ends at once unless the store does not answer."""

POLL_S = 0.02
"""How often `Board.gather` asks."""

_AWAY = "its machine is down or out of reach"

FINISHED = "finished"

SILENT_S = 2.0
"""A rank posts about twice a second; one that has not for so long is shown to be silent."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank does, as it last posted it.

    doing: the action it is at, such as "2F5".
    waits_for: what it waits for, such as "0SEND_F2>1 from rank 0"; empty while it does not wait.
    waits_on: the ranks that must bring it about.  waiting_s: seconds it has waited.
    beat: counts its postings.
    silent_s: seconds since whoever reads this last saw a new posting.
    """

    doing: str = ""
    waits_for: str = ""
    waits_on: tuple[int, ...] = ()
    waiting_s: float = 0.0
    beat: int = 0
    silent_s: float = 0.0

    @property
    def is_silent(self) -> bool:
        return self.silent_s >= SILENT_S and self.doing != FINISHED


def who_waits(statuses: Sequence[RankStatus | None]) -> str:
    """A table of what each rank does and waits for, and the ranks that wait for each other, if any.

    Of a rank that has fallen silent it shows what was last heard.

    >>> waits = RankStatus(doing="0B0", waits_for="1SEND_B0>0 from rank 1", waits_on=(1,), waiting_s=2)
    >>> print(who_waits([waits, RankStatus(doing="1F1", silent_s=12), None]))
    rank  does  waits for
    0     0B0   1SEND_B0>0 from rank 1, for 2.0 s
    1     1F1   - (silent for 12 s)
    2     ?     (it has not said anything yet)
    """
    rows = [("rank", "does", "waits for")]
    for rank, status in enumerate(statuses):
        if status is None:
            rows.append((str(rank), "?", "(it has not said anything yet)"))
            continue
        waits = f"{status.waits_for}, for {status.waiting_s:.1f} s" if status.waits_for else "-"
        silent = f" (silent for {status.silent_s:.0f} s)" if status.is_silent else ""
        rows.append((str(rank), status.doing, waits + silent))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    if circle := waiting_circle(statuses):
        lines.append(" -> ".join(f"rank {rank}" for rank in circle) + ": they wait for each other")
    return "\n".join(lines)


def waiting_circle(statuses: Sequence[RankStatus | None]) -> list[int]:
    """Ranks of which each waits on the next one, first and last the same; empty if there are none.

    A silent rank is in none: what it does now is not known, and there is the cause.
    """
    heard = {rank: s for rank, s in enumerate(statuses) if s is not None and not s.is_silent}
    waits_on = {rank: s.waits_on[0] for rank, s in heard.items() if len(s.waits_on) == 1}
    for start in waits_on:
        path = [start]
        while path[-1] in waits_on and len(path) <= len(waits_on):
            path.append(waits_on[path[-1]])
            if path[-1] == start:
                return path
    return []


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong.

    rank: who failed; None if it cannot be known.
    summary: one line, such as "ValueError: boom".
    traceback: the text that Python prints; empty if the rank left none.
    hung: whether a transfer did not end.
    found_by: the rank that noticed, if the one that failed could not say so itself.
    table: what that rank then knew of who waits for whom.
    """

    rank: int | None
    summary: str
    traceback: str = ""
    hung: bool = False
    found_by: int | None = None
    table: str = ""


class StoreCalls:
    """Makes calls on one connection to a store, one after the other, in a thread of its own.

    Whoever serves the store may be frozen, or its machine out of reach: then a call does not return, and no
    time limit of torch's ends it.

    connect: makes the connection; called in that thread, and its error is the error of every call.
    """

    def __init__(self, connect: Callable[[], Store], name: str) -> None:
        self._thread = OneThread(name)
        self._connect: Callable[[], Store] | None = connect
        self._connection: Future[Store]

    def call(self, use: Callable[[Store], T], limit_s: float, *, keep: bool = False) -> T:
        """What `use` returns.

        keep: make the call even after the caller has given up, once those before it have returned.
        Raises: TimeoutError if it has not returned within the limit; what `use` raises, such as DistError.
        """
        if self._connect is not None:  # which may hold the caller's store, and that is the caller's to close
            self._connection, self._connect = self._thread.submit(self._connect), None
        future = self._thread.submit(lambda: use(self._connection.result()))
        waited_s = 0.0
        while waited_s < limit_s:
            # Slices are counted and not time: this process may have been frozen itself, as by Ctrl-Z.
            slice_s = min(1.0, limit_s - waited_s)
            try:
                return future.result(slice_s)
            except TimeoutError:
                if future.done():
                    raise
                waited_s += slice_s
        if not keep:
            future.cancel()
        raise TimeoutError(f"the store has not answered for {limit_s:g} s")

    def close(self) -> None:
        """No more calls will come."""
        self._thread.close(CLOSING_S)


class Board:
    """One rank's access to the board, kept up to date by a side thread.

    Whoever serves the store may be frozen or out of reach. So every call on it is made by a further thread,
    on a connection of its own, and every method here ends within a limit, with what is known by then.

        pipeloom-watch-R   every interval: asks for one exchange, and waits for it at most `lost_s`
        pipeloom-store-R   makes all calls on the store, one after the other
        any thread         `announce`, `statuses`, ... wait for their calls at most `PATIENCE_S`

    Keys, below `name`:  failure      JSON of the first `Failure`; set once, by compare_set
                         state/R      JSON of rank R's last `RankStatus`, rewritten every `interval_s`
                         texts/N/R    what rank R brings to the N-th `gather`

    name: the same on all ranks. All of them make boards of this name equally often.
    failure: the first one as far as it is known here.
    interval_s: between two exchanges.
    lost_s: a rank whose postings stop for so long has failed, and so has a store that does not answer for so
        long. Each rank watches the next one, and keeps up with `FOLLOWED` others in turn, so the store gets a
        dozen calls per rank and interval, however many ranks there are.
    server: the rank that serves the store, if it is one of them.
    Raises: TimeoutError if the store does not answer for `lost_s`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        *,
        name: str = "pipeloom",
        interval_s: float = 0.5,
        lost_s: float = 60.0,
        server: int | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.failure: Failure | None = None
        # Its type lists no clone.
        self._calls = StoreCalls(store.clone, name=f"pipeloom-store-{rank}")  # type: ignore[attr-defined]
        if ranks > 1:
            number = self._calls.call(lambda store: store.add(f"{name}/boards/{rank}", 1), lost_s)
            name = f"{name}/{number}"
        self._name = name
        self._interval_s = interval_s
        self._lost_s = lost_s
        self._patience_s = min(PATIENCE_S, lost_s)
        self._server = server
        self._beat = 0
        self._next = 0
        self._gathered = 0
        self._heard: dict[int, _Heard] = {}
        self._exchanged_s = time.monotonic()
        self._stopped = threading.Event()
        self._own_status: Callable[[], RankStatus] = RankStatus
        self._thread: threading.Thread | None = None

    def start(self, status: Callable[[], RankStatus], on_failure: Callable[[Failure], None]) -> None:
        """Post `status()` from now on; call `on_failure` once when a failure becomes known."""
        self._own_status = status
        if self.ranks == 1:
            return
        self._try(self._post_status)
        self._thread = threading.Thread(
            target=self._run, args=(on_failure,), name=f"pipeloom-watch-{self.rank}", daemon=True
        )
        self._thread.start()

    def announce(self, failure: Failure) -> Failure:
        """Post a failure; returns the first one, which may be another rank's."""
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
        """The failure, as soon as it is known; None if there is none within the time."""
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
        """What each rank last posted, as far as it can be known within `PATIENCE_S`; None for one that has
        not posted yet."""

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

    def gather(self, text: str, timeout_s: float) -> list[str]:
        """One short text from every rank, in rank order. All ranks call it equally often.

        Raises: TimeoutError if they do not all come in time; ConnectionError if a rank failed, or the store.
        """
        if self.ranks == 1:
            return [text]
        name, self._gathered = self._key(f"texts/{self._gathered}"), self._gathered + 1
        keys = [f"{name}/{rank}" for rank in range(self.ranks)]
        end_s = time.monotonic() + timeout_s
        try:
            self._calls.call(lambda store: store.set(keys[self.rank], text), timeout_s)
            while not self._calls.call(lambda store: store.check(keys), timeout_s):
                if self.failure is not None:
                    raise ConnectionError("a rank failed")
                if time.monotonic() > end_s:
                    raise TimeoutError
                time.sleep(POLL_S)
            return self._calls.call(lambda store: [store.get(key).decode() for key in keys], timeout_s)
        except dist.DistError as error:
            raise ConnectionError(str(error).partition("\n")[0]) from None

    def stop(self) -> None:
        """Leave the board; others see what was posted last."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._interval_s + 1)
        if self.ranks > 1:  # whoever serves the store waits for this last word, so it is worth waiting for
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
        with suppress(dist.DistError, TimeoutError):  # the side thread finds it, too, and says so
            self._calls.call(use, self._patience_s if limit_s is None else limit_s)

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"


class _Heard(NamedTuple):
    """A rank's last posting, and when this rank first saw it (time.monotonic)."""

    status: RankStatus
    at_s: float
