"""Files that are written: whole or not at all, and what the disk refuses as one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While `path` is written. Raises: ConfigError if the disk refuses."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="check the folder, and the room on its disk"
        ) from None


def write_whole(path: Path, text: str) -> None:
    """Write text so that the file has all of it, or stays as it was.

    What is no plain file (/dev/stdout, a named pipe) is written to as it is: it cannot be replaced. A link
    stays one.
    Raises: ConfigError if the disk refuses; nothing stays behind then.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))  # which takes links that lead to themselves, too
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
