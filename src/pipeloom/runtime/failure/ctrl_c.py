"""Ctrl-C for a thread that waits in C++ code.

Python handles a signal once its main thread is back in Python code, which a blocked wait is not. The part of
the handling that happens at once is a byte written to the wake-up descriptor; a side thread reads it and
ends the wait, so that the main thread gets its KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

PATIENCE_S = 0.2
"""Time for the main thread to come back by itself."""


class CtrlC:
    """While started, ends waits of the main thread when SIGINT comes.

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
                time.sleep(PATIENCE_S)
                if self._blocked():
                    self._interrupt()
        os.close(read)
