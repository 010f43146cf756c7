"""Numbers as people read them; sizes are `format_bytes` of ir/units. Elsewhere: plain seconds and shares."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class SizeUnit:
    """Another unit for memory than bytes, such as micro-batches.

    >>> SizeUnit(name="micro-batches", bytes=1024).show(2560)
    '2.5'
    """

    name: str
    bytes: int

    def show(self, size: float) -> str:
        return f"{size / self.bytes:.4g}"


def show_size(size: float, unit: SizeUnit | None) -> str:
    return format_bytes(size) if unit is None else unit.show(size)


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit for an axis that ends at `longest_s`, and how many of it make a second.

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
    >>> show_time(12.5), show_time(0.4298), show_time(0.0123456), show_time(4.2e-5), show_time(0)
    ('12.50 s', '429.8 ms', '12.35 ms', '42.00 µs', '0 s')
    """
    if seconds == 0:
        return "0 s"
    unit, scale = ("s", 1.0) if abs(seconds) >= 1 else ("ms", 1e3) if abs(seconds) >= 1e-3 else ("µs", 1e6)
    value = seconds * scale
    return f"{value:.{1 if abs(value) >= 100 else 2}f} {unit}"


def show_count(count: float) -> str:
    """
    >>> show_count(70_553_706_496), show_count(1_250_000), show_count(12_345), show_count(12)
    ('70.6 B', '1.25 M', '12.3 k', '12')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:.0f}"


def show_share(share: float) -> str:
    """
    >>> show_share(0.1234)
    '12.3 %'
    """
    return f"{share * 100:.1f} %"


def show_error(error: float) -> str:
    """A signed relative difference.

    >>> show_error(-0.012), show_error(0.2), show_error(-0.0001)
    ('-1.2 %', '+20.0 %', '0.0 %')
    """
    text = f"{error * 100:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text
