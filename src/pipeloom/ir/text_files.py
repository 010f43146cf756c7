"""Files: written whole or not at all, TOML that users write, and each failure as one sentence."""

from __future__ import annotations

import os
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .errors import ConfigError, shown


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
        # A name that nobody can foresee, and put a link there; and if they could, it would not be followed.
        partial = target.with_name(f"{target.name[:40]}.{secrets.token_hex(8)}.partial")
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """A document as plain values.

    what: names the text in the error, for instance the file's path.
    Raises: ConfigError if it is no TOML, or holds what Python cannot read: numbers of more than 4300 digits,
        lists thousands deep.

    >>> parse_toml("steps = 4", "config.toml")
    {'steps': 4}
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} is not valid TOML: {error}", hint="mend that line") from None
    except ValueError:
        raise ConfigError(
            f"{what} has a number of thousands of digits", hint="write rates, times and sizes below 1e30"
        ) from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply", hint="no key takes lists in lists") from None


def refuse_unknown(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises: ConfigError that says where a table has a key that is not known, with the nearest that is."""
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
            raise ConfigError(f"{where} has the unknown key {shown(key)}", hint=hint)
