"""Sizes as text."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pipeloom.ir.errors import ConfigError
from pipeloom.ir.text import UNITS, enough_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("1", 1), ("1B", 1), (7, 7), (" 2 KiB ", 2048), ("1.5MiB", 1572864), ("2kB", 2000)),
        *(("0.5GB", 500_000_000), ("24.2MiB", 25_375_539)),
    ],
)
def test_what_is_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (text, "cannot read")
            for text in ("", "GiB", "-1GiB", "1e9", "1GiB2", "1,5GiB", "inf", -5, True, None, 1.5)
        ),
        ("1Gib", "'Gib'"),
        ("3 parsecs", "'parsecs'"),
        ("0MiB", "no size above 0"),
        (0, "no size above 0"),
        ("0.3B", "less than a byte"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_bytes(text)


@given(number=st.integers(1, 10**6), unit=st.sampled_from(sorted(UNITS)))
def test_numbers_and_units(number, unit):
    assert parse_bytes(f"{number}{unit}") == number * UNITS[unit]


def test_for_people():
    assert [format_bytes(n) for n in (0, 1023, 1024, 10**9)] == ["0 B", "1023 B", "1.0 KiB", "953.7 MiB"]


@given(size=st.integers(1, 10**14))
def test_what_is_printed_can_be_typed_in_again(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.051)
    assert size <= parse_bytes(enough_bytes(size)) <= max(size + 1, size * 1.011)
