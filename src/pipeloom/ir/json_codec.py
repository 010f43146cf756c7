"""JSON for the frozen dataclasses of this package, checked while reading (msgspec)."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import ConfigError
from .text_files import write_whole

T = TypeVar("T")


def to_json(noun: object, *, indent: int = 1) -> str:
    """One noun as JSON text; `indent=0` gives a single line.

    >>> from pipeloom.ir.cluster import Link
    >>> to_json(Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4), indent=0)
    '{"bandwidth_bytes_per_s":1000000000.0,"latency_s":0.0001,"overhead_s":0.0,"overhead_s_per_byte":0.0}'
    """
    text = msgspec.json.encode(noun)
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def from_json(text: str | bytes, kind: type[T], *, what: str) -> T:
    """Read a noun back.

    `what` names the text in the error, for instance the file's path.
    Raises: ConfigError if the text is not JSON or does not match the noun's fields.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{what} is not a valid {kind.__name__}: {shortened(str(error))}",
            hint="write it again with this version of pipeloom",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} is not text in UTF-8, from its byte {error.start} on", hint="write it again"
        ) from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply", hint="write it again") from None


def shortened(text: str, most: int = 400) -> str:
    """A message without the middle of the long value that it quotes; its end says where that stands.

    >>> shortened("Invalid enum value '0F99999999999999' - at `$.weights`", most=48)
    "Invalid enum value '0F9 … 9999' - at `$.weights`"
    """
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]} … {text[-half + 1 :]}"


def save(noun: object, path: Path) -> None:
    """Write a noun to a file, whole or not at all. Raises: ConfigError if the disk refuses."""
    write_whole(path, to_json(noun) + "\n")


def load(path: Path, kind: type[T], *, strict: bool = False) -> T:
    """Read a noun from a file.

    strict: refuse keys that the noun does not have, which are slips of whoever edited the file.
    Raises: ConfigError if it is missing, unreadable or invalid.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {kind.__name__} from {path}: {error.strerror}",
            hint="check the path",
        ) from None
    noun = from_json(text, kind, what=str(path))
    if strict:
        _refuse_unknown_keys(from_json(text, dict, what=str(path)), msgspec.to_builtins(noun), str(path))
    return noun


def _refuse_unknown_keys(given: Any, known: Any, where: str) -> None:
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key not in known:
                near = get_close_matches(key, known, n=1)
                raise ConfigError(
                    f"{where} has a key that is not known: {shortened(repr(key), most=80)}",
                    hint=f"did you mean {near[0]}?" if near else f"the keys there are {', '.join(known)}",
                )
            _refuse_unknown_keys(value, known[key], f"{where}: {key}")
    elif isinstance(given, list) and isinstance(known, list | tuple):
        for index, (value, same) in enumerate(zip(given, known, strict=False)):
            _refuse_unknown_keys(value, same, f"{where}[{index}]")


def as_plain(noun: object) -> Any:
    """The noun as dicts, lists, strings and numbers."""
    return msgspec.to_builtins(noun)
