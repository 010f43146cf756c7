"""A thread of its own for calls that may not return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class OneThread:
    """Makes calls one after the other. One that does not return keeps the thread, but not the process: other
    than those of a `ThreadPoolExecutor` it is a daemon.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """What it will return, or raise. One that is cancelled before its turn is not made."""
        future: Future[T] = Future()
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put((future, call))
        return future

    def close(self, limit_s: float) -> None:
        """No more calls will come. Waits at most so long for the last one to return."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join(limit_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:  # whatever it is, it is the caller's
                    future.set_exception(error)
            del item, future, call  # or they would keep what they hold until the next one
