"""Calls on a torch.distributed store that hold up their caller only so long.

Who serves the store may be frozen, or its machine out of reach: then a call does not return, and no time
limit of torch's ends it. So calls are made by side threads, and callers wait for these with a limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")

SLICE_S = 0.1
"""How often `call_within` asks whether to give up."""

CLOSING_S = 1.0
"""How long `StoreCalls.close` waits for its thread, which ends at once unless the store does not answer."""


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...


class StoreCalls:
    """Makes calls on one connection to a store, one after the other, in a thread of its own.

    connect: makes the connection; called in that thread, and its error is the error of every call.
    """

    def __init__(self, connect: Callable[[], Store], name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[Future[Store]], None] | None] = queue.SimpleQueue()
        self._connect: Callable[[], Store] | None = connect
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, use: Callable[[Store], T], limit_s: float, *, keep: bool = False) -> T:
        """What `use` returns.

        keep: make the call even after the caller has given up, once those before it have returned.
        Raises: TimeoutError if it has not returned within the limit; what `use` raises, such as DistError.
        """
        future: Future[T] = Future()

        def run(connection: Future[Store]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(use(connection.result()))
            except Exception as error:  # whatever it is, it is the caller's
                future.set_exception(error)

        self._queue.put(run)
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
        """No more calls will come. A call that does not return keeps its thread, but not the process."""
        self._queue.put(None)
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        connection: Future[Store] = Future()
        assert self._connect is not None, "it runs once"
        try:
            connection.set_result(self._connect())
        except Exception as error:  # every call raises it
            connection.set_exception(error)
        self._connect = None  # it may hold the caller's store, which is the caller's to close
        while (use := self._queue.get()) is not None:
            use(connection)


def call_within(limit_s: float, use: Callable[[], T], *, broken: Callable[[], bool] = lambda: False) -> T:
    """What `use` returns, called in a side thread, which is left alone if it takes too long.

    broken: asked all the time; once it says so, there is no point in waiting on.
    Raises: TimeoutError if the limit passes, ConnectionError if it is broken; what `use` raises.

    >>> call_within(10.0, lambda: 2 + 2)
    4
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(use())
        except Exception as error:  # whatever it is, it is the caller's
            future.set_exception(error)

    threading.Thread(target=run, name="pipeloom-store-call", daemon=True).start()
    end = time.monotonic() + limit_s
    while not future.done() and time.monotonic() < end:
        if broken():
            raise ConnectionError("a rank failed")
        try:
            future.exception(min(SLICE_S, max(end - time.monotonic(), 0.0)))
        except TimeoutError:
            pass
    if not future.done():
        raise TimeoutError(f"the store has not answered for {limit_s:g} s")
    return future.result()
