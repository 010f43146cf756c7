"""Text: sizes and times as people read them, nouns as JSON, TOML that users write, and files written whole or
not at all. Each failure is one sentence.
"""

from __future__ import annotations

import os
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from decimal import ROUND_CEILING, Decimal
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import ConfigError, did_you_mean, shown

UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
LARGEST = 1e30
"""Sizes, times and rates from here on are refused."""


def odd_figure(figures: Mapping[str, object]) -> tuple[str, float] | None:
    """The first number that no size or time can be, and where: below 0, `LARGEST` and more, or NaN.

    figures: by name; those in mappings, sequences and dataclasses are looked at, too.

    >>> odd_figure({"node": 0, "rates": {"float32": 1.0, "float64": -1.0}})
    ('rates[float64]', -1.0)
    """
    for name, value in figures.items():
        inside: dict[str, object] = {}
        if isinstance(value, int | float):
            if not 0 <= value < LARGEST:
                return name, value
        elif is_dataclass(value):
            inside = {f"{name}.{key}": each for key, each in vars(value).items()}
        elif isinstance(value, Mapping):
            inside = {f"{name}[{key}]": each for key, each in value.items()}
        elif isinstance(value, tuple | list):
            inside = {f"{name}[{index}]": each for index, each in enumerate(value)}
        if inside and (odd := odd_figure(inside)) is not None:
            return odd
    return None


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_HINT = "write a number and a unit, as in 300MiB, 1.5GiB or 2GB"
_BELOW = "sizes are below 1e30 bytes"


def parse_bytes(size: str | int, *, what: str = "") -> int:
    """A size in bytes; a number without a unit is in bytes.

    what: names it in the error.

    >>> parse_bytes("300MiB"), parse_bytes("1.5 GiB"), parse_bytes("2GB"), parse_bytes(4096)
    (314572800, 1610612736, 2000000000, 4096)

    Sizes are printed rounded, so that they may be typed in again, part of a byte does not count:

    >>> parse_bytes("24.2MiB")
    25375539

    Raises: ConfigError unless the whole text is a positive number with a known unit, of at least one byte
        and below `LARGEST`.
    """
    named = f"{what}: " if what else ""
    if isinstance(size, bool) or not isinstance(size, (str, int)):
        raise ConfigError(f"{named}cannot read {shown(size)} as a size", hint=_HINT)
    if isinstance(size, int) and size >= LARGEST:  # Python writes out no number of many thousand digits
        raise ConfigError(f"{named}{shown(size)} is too large for a size", hint=_BELOW)
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ConfigError(f"{named}cannot read {shown(size)} as a size", hint=_HINT)
    number, unit = match.groups()
    if unit not in UNITS:
        raise ConfigError(
            f"{named}{shown(size)} has the unknown unit {shown(unit)}",
            hint=f"use one of {', '.join(u for u in UNITS if u)}",
        )
    if float(number) * UNITS[unit] >= LARGEST:
        raise ConfigError(f"{named}{shown(size)} is too large for a size", hint=_BELOW)
    exact = Decimal(number) * UNITS[unit]
    if exact < 1:
        raise ConfigError(f"{named}{shown(size)} is less than a byte", hint=_HINT)
    return int(exact)


def format_bytes(size: float) -> str:
    """A size for people, in the largest binary unit that leaves at least 1 when it is rounded.

    >>> format_bytes(314572800), format_bytes(999), format_bytes(43 * 2**30), format_bytes(2**20 - 1)
    ('300.0 MiB', '999 B', '43.0 GiB', '1.0 MiB')
    """
    unit = byte_unit(size)
    return f"{unit.show(size)} {unit.name}"


def enough_bytes(size: int) -> str:
    """A size that is advised, rounded up by at most 1 %: who gives what it says gives at least so much.

    >>> enough_bytes(25375540), enough_bytes(2**30 - 2**16), enough_bytes(2**30 + 1), enough_bytes(999)
    ('24.3 MiB', '1.00 GiB', '1.01 GiB', '999 B')
    """
    unit = byte_unit(size * 1.0001).name  # rounded up, 1023.91 would be 1024.0
    if unit == "B":
        return f"{size} B"
    digits = 2 if size < 10 * UNITS[unit] else 1
    rounded = (Decimal(size) / UNITS[unit]).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING)
    text = f"{rounded} {unit}"
    # Reading it back cuts off a part of a byte, which may be the one that is needed.
    return text if parse_bytes(text) >= size else f"{rounded + Decimal(1).scaleb(-digits)} {unit}"


def byte_unit(size: float) -> SizeUnit:
    """The largest binary unit of which `size`, as it is shown, has at least one."""
    for name in ("B", "KiB", "MiB", "GiB", "TiB"):
        unit = SizeUnit(name=name, bytes=UNITS[name], digits=".0f" if name == "B" else ".1f")
        if abs(float(unit.show(size))) < 1024:
            break
    return unit


@dataclass(frozen=True, kw_only=True)
class SizeUnit:
    """What sizes are counted in: a unit of bytes, or something such as micro-batches.

    >>> SizeUnit(name="micro-batches", bytes=1024).show(2560)
    '2.5'
    """

    name: str
    bytes: int
    digits: str = ".4g"

    def show(self, size: float) -> str:
        return f"{size / self.bytes:{self.digits}}"


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit for figures of up to `longest_s` seconds, and how many of it make a second.

    >>> time_unit(0.25)
    ('ms', 1000.0)
    """
    if longest_s >= 10:
        return "s", 1.0
    if longest_s >= 0.002:
        return "ms", 1e3
    return "µs", 1e6


def show_time(seconds: float) -> str:
    """
    >>> show_time(12.5), show_time(0.99999), show_time(0.4298), show_time(4.2e-5), show_time(0)
    ('12.50 s', '1.00 s', '429.8 ms', '42.00 µs', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, scale in (("µs", 1e6), ("ms", 1e3), ("s", 1.0)):
        value = seconds * scale
        if unit == "s" or round(abs(value), 1) < 1000:
            break
    return f"{value:.{1 if abs(value) >= 100 else 2}f} {unit}"


def show_plain(value: float) -> str:
    return f"{value:.6g}"


def show_count(count: float) -> str:
    """
    >>> show_count(70_553_706_496), show_count(999_999), show_count(12_345), show_count(12)
    ('70.6 B', '1 M', '12.3 k', '12')
    """
    rounded = float(f"{count:.3g}")
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if rounded >= size:
            return f"{rounded / size:.3g} {letter}"
    return f"{count:.0f}"


def show_microbatches(count: int) -> str:
    """
    >>> show_microbatches(1), show_microbatches(8)
    ('1 micro-batch', '8 micro-batches')
    """
    return f"{count} micro-batch{'es' * (count != 1)}"


def show_share(share: float) -> str:
    """
    >>> show_share(0.1234), show_share(-1e-9)
    ('12.3 %', '0.0 %')
    """
    return f"{share * 100:.1f} %".replace("-0.0 ", "0.0 ")


def show_error(error: float) -> str:
    """A signed relative difference.

    >>> show_error(-0.012), show_error(0.2), show_error(-0.0001)
    ('-1.2 %', '+20.0 %', '0.0 %')
    """
    text = f"{error * 100:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


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


def dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of tables in tables by their dotted keys. An empty table counts as a value.

    >>> list(dotted({"model": {"width": 256}, "steps": 10}))
    [('model.width', 256), ('steps', 10)]
    """
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def refuse_unknown(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises: ConfigError that says where a table has a key that is not known, with the nearest that is."""
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known, f"the keys are {', '.join(known)}")
            raise ConfigError(f"{where} has the unknown key {shown(key)}", hint=hint)


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


def as_utf8(text: str) -> str:
    r"""Text that UTF-8 can hold: what it cannot, as in names of files that were not UTF-8, is escaped.

    >>> as_utf8("data/\udcff.txt")
    'data/\\udcff.txt'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def save_noun(noun: object, path: Path) -> None:
    """Write a noun to a file, whole or not at all. Raises: ConfigError if the disk refuses."""
    write_whole(path, to_json(noun) + "\n")


def load_noun(path: Path, kind: type[T], *, strict: bool = False) -> T:
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
                raise ConfigError(
                    f"{where} has a key that is not known: {shortened(repr(key), most=80)}",
                    hint=did_you_mean(key, known, f"the keys there are {', '.join(known)}"),
                )
            _refuse_unknown_keys(value, known[key], f"{where}: {key}")
    elif isinstance(given, list) and isinstance(known, list | tuple):
        for index, (value, same) in enumerate(zip(given, known, strict=False)):
            _refuse_unknown_keys(value, same, f"{where}[{index}]")


def as_plain(noun: object) -> Any:
    """The noun as dicts, lists, strings and numbers."""
    return msgspec.to_builtins(noun)


def finite(value: Any) -> Any:
    """Plain values in which infinities and NaN are text, since JSON has neither.

    >>> finite({"losses": [2.5, float("nan")]})
    {'losses': [2.5, 'nan']}
    """
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
