"""Sizes as text: "300MiB" to bytes and back."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

from .errors import ConfigError, shown

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

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_HINT = "write a number and a unit, as in 300MiB, 1.5GiB or 2GB"
DIGITS = 100_000
"""Of a size as text, at most: more than 999,999 are too many for `Decimal`."""

_BELOW = "sizes are below 1e30 bytes"


def parse_bytes(size: str | int) -> int:
    """A size in bytes; a number without a unit is in bytes.

    >>> parse_bytes("300MiB"), parse_bytes("1.5 GiB"), parse_bytes("2GB"), parse_bytes(4096)
    (314572800, 1610612736, 2000000000, 4096)

    Sizes are printed rounded, so that they may be typed in again, part of a byte does not count:

    >>> parse_bytes("24.2MiB")
    25375539

    Raises: ConfigError unless the whole text is a positive number with a known unit, of at least one byte
        and below `LARGEST`.
    """
    if isinstance(size, bool) or not isinstance(size, (str, int)):
        raise ConfigError(f"cannot read {shown(size)} as a size", hint=_HINT)
    if isinstance(size, int) and size >= LARGEST:  # Python writes out no number of many thousand digits
        raise ConfigError(f"{shown(size)} is too large for a size", hint=_BELOW)
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ConfigError(f"cannot read {shown(size)} as a size", hint=_HINT)
    number, unit = match.groups()
    if unit not in UNITS:
        raise ConfigError(
            f"{shown(size)} has the unknown unit {shown(unit)}",
            hint=f"use one of {', '.join(u for u in UNITS if u)}",
        )
    if len(number) > DIGITS:
        raise ConfigError(f"{shown(size)} has {len(number)} digits", hint=_BELOW)
    exact = Decimal(number) * UNITS[unit]
    if exact <= 0:
        raise ConfigError(f"{shown(size)} is no size above 0", hint=_HINT)
    if exact < 1:
        raise ConfigError(f"{shown(size)} is less than a byte", hint=_HINT)
    if exact >= Decimal(LARGEST):
        raise ConfigError(f"{shown(size)} is too large for a size", hint=_BELOW)
    return int(exact)


def format_bytes(size: float) -> str:
    """A size for people, in the largest binary unit that leaves at least 1.

    >>> format_bytes(314572800), format_bytes(999), format_bytes(43 * 2**30)
    ('300.0 MiB', '999 B', '43.0 GiB')
    """
    unit = _unit_of(size)
    return f"{size:.0f} B" if unit == "B" else f"{size / UNITS[unit]:.1f} {unit}"


def enough_bytes(size: int) -> str:
    """A size that is advised, rounded up by at most 1 %: who gives what it says gives at least so much.

    >>> enough_bytes(25375540), enough_bytes(25 * 2**20), enough_bytes(2**30 + 1), enough_bytes(999)
    ('24.3 MiB', '25.0 MiB', '1.01 GiB', '999 B')
    """
    unit = _unit_of(size)
    if unit == "B":
        return f"{size} B"
    digits = 2 if size < 10 * UNITS[unit] else 1
    rounded = (Decimal(size) / UNITS[unit]).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING)
    text = f"{rounded} {unit}"
    # Reading it back cuts off a part of a byte, which may be the one that is needed.
    return text if parse_bytes(text) >= size else f"{rounded + Decimal(1).scaleb(-digits)} {unit}"


def _unit_of(size: float) -> str:
    return next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if abs(size) >= UNITS[unit]), "B")
