"""Starting the ranks of one machine, and ending them together.

However it ends, no process stays: a failing rank, Ctrl-C and SIGTERM end all ranks from here
(`processes.py`), and if this process itself is killed, each rank ends itself (`child.py`). Nothing here
imports torch before the ranks have started.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from ...ir.errors import ConfigError
from ..allocator import with_huge_pages
from .child import LAUNCHER_STORE
from .launcher_store import LauncherStore
from .processes import Processes, at_ends_of_children, terminate_as_exit

HOST = "127.0.0.1"


def launch(
    target: Callable[..., object],
    ranks: int,
    *,
    args: Sequence[object] = (),
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: float | None = None,
) -> int:
    """Run `target(*args)` in `ranks` new processes on this machine and wait until all have ended.

    target, args: must be picklable; a script that gives its own function needs the usual `__name__` guard.
    port: where the ranks find each other; None takes a free one.
    env: further environment variables for all ranks.
    grace_s: after a rank failed, the others get so long to end by themselves, then SIGTERM and SIGKILL; by
        default 5 s, and 1 s after one that a signal killed, as it told them nothing to pass on.
    Returns: 0, or the exit status of the rank that failed first (128 + signal if it was killed). What that
        rank failed with has then been printed to standard error, once. What ranks other than 0 write is
        printed with the rank before each line.
    Raises: ConfigError if the port is taken or `ranks` is not positive; KeyboardInterrupt on Ctrl-C and
        SystemExit on SIGTERM, after all ranks have ended.
    """
    with StartedRanks(ranks, port=port, env=env) as started:
        return started.run(target, args, grace_s=grace_s)


class StartedRanks:
    """Processes of all ranks, started before it is known what they will run: importing torch and a model's
    library takes them seconds, in which the launching process plans. A context manager: where nothing is run
    in them, or that fails, they end with it. A rank that ends before it has work ends the launching process,
    too, by SystemExit, after it has told what the rank died of.

    ranks, port, env: see `launch`.  prepare, args: what each rank calls meanwhile, picklable. What it raises
    goes unsaid: its work is expected to meet the same again.  needed: False where the launching process has
    something to give without them: a rank that ends early is then told of by `run` only.
    Raises: ConfigError as `launch`.
    """

    def __init__(
        self,
        ranks: int,
        *,
        prepare: Callable[..., object] = bool,
        args: Sequence[object] = (),
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        needed: bool = True,
    ) -> None:
        if ranks < 1:
            raise ConfigError(f"{ranks} processes", hint="use at least 1")
        self.ranks = ranks
        with ExitStack() as stack:
            listener = _listen(port)
            port = listener.getsockname()[1]
            stack.callback(LauncherStore(listener).close)
            stack.enter_context(terminate_as_exit())
            self._processes = Processes(pickle.dumps((prepare, tuple(args))))
            stack.callback(self._processes.stop)
            for rank in range(ranks):
                self._processes.start(rank, _environment(rank, ranks, port) | dict(env or {}))
            self._without_work = stack.enter_context(ExitStack())
            if needed:
                self._without_work.enter_context(at_ends_of_children(self._processes.exit_if_one_failed))
            self._stack = stack.pop_all()

    def prepare(self, target: Callable[..., object], args: Sequence[object] = ()) -> None:
        """Let each rank call something else before its work, as `prepare` of the constructor. Returns at once
        if the ranks are through with that; else when they are."""
        self._processes.prepare(pickle.dumps((target, tuple(args))))

    def run(
        self, target: Callable[..., object], args: Sequence[object] = (), *, grace_s: float | None = None
    ) -> int:
        """What `launch` does, in these processes, once."""
        self._without_work.close()
        self._processes.give(pickle.dumps((target, tuple(args))), _main_file(target))
        return self._processes.wait(grace_s)

    def __enter__(self) -> StartedRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _listen(port: int | None) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port or 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(
            f"port {port} {reason}", hint="choose another one, or leave it out to take a free one"
        ) from None
    return listener


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
        LAUNCHER_STORE: "1",
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
