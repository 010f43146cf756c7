"""One run at a time in a run directory.

The lock is the kernel's (flock), so it ends with the process that holds it, however that ends: the file that
a killed run leaves behind stops nobody. What is written there only says who holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import warnings
from pathlib import Path
from types import TracebackType

from ..ir.errors import ConfigError, shown

LOCK = "lock"


class RunLock:
    """Holds a run directory from `take` to the end of the block.

    with RunLock() as lock:
        lock.take(Path("runs/gpt-1"))
    """

    def __init__(self) -> None:
        self._held: tuple[Path, int] | None = None

    def take(self, out: Path) -> None:
        """Raises: ConfigError that names the process which has the directory, or why it cannot be locked."""
        path = out / LOCK
        while True:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            except OSError as error:
                raise ConfigError(f"cannot lock {out}: {error.strerror}", hint="check its rights") from None
            if not _locked(handle, out):
                os.close(handle)
                return  # of which a warning was given
            if _is(handle, path):
                break
            os.close(handle)  # whoever held it has removed the file in between
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
        self._held = (path, handle)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let others have the directory. May be called twice."""
        if self._held is None:
            return
        (path, handle), self._held = self._held, None
        if _is(handle, path):  # still ours: the directory may have been removed and made again
            path.unlink(missing_ok=True)
        os.close(handle)


def _locked(handle: int, out: Path) -> bool:
    """Whether the lock was taken; not on a disk that has no locks.

    Raises: ConfigError if another process has it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(handle)
        os.close(handle)
        raise ConfigError(
            f"{out} is in use by {holder}", hint="wait until it has ended, or end it; or choose another --out"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            os.close(handle)
            raise ConfigError(f"cannot lock {out}: {error.strerror}", hint="choose another --out") from None
        warnings.warn(f"{out} is on a disk without locks: see that no other run uses it", stacklevel=3)
        return False
    return True


def _holder(handle: int) -> str:
    """The process that holds the lock, as far as it has said so."""
    try:
        said = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(said['pid'])} on {shown(str(said['host']))[1:-1]}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"


def _is(handle: int, path: Path) -> bool:
    """Whether the open file is what lies at the path."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False
