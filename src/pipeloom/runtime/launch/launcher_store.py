"""The store by which the ranks of one machine find each other, served by the process that launches them.

Were it a rank that served it, a frozen one would take away from all others what tells them of each other.
"""

from __future__ import annotations

import os
import select
import socket
import threading


class LauncherStore:
    """Serves a store on a socket that already listens, from the first connection on.

    Only then is torch imported, in a side thread: who launches needs none, and the ranks start at once.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._closed_read, self._closed_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="pipeloom-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No rank needs it any more."""
        os.close(self._closed_write)
        self._thread.join()

    def _serve(self) -> None:
        ready, _, _ = select.select([self._listener.fileno(), self._closed_read], [], [])
        if self._listener.fileno() in ready:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # a documented name

            host, port = self._listener.getsockname()
            store = TCPStore(
                host,
                port,
                is_master=True,
                master_listen_fd=self._listener.detach(),  # which it closes
                wait_for_workers=False,
            )
            select.select([self._closed_read], [], [])
            del store
        self._listener.close()
        os.close(self._closed_read)
