"""Sizes and JSON as text; texts that were answered with a traceback, pages of digits or all memory."""

import tracemalloc
from dataclasses import replace
from functools import partial

import pytest
from damage import PLAN
from hypothesis import given, strategies as st

from pipeloom.checks.schedules import check
from pipeloom.ir.action import parse_action
from pipeloom.ir.errors import ConfigError, PlanError, ScheduleError
from pipeloom.ir.plan import Plan
from pipeloom.ir.schedule import Schedule, parse_pairs, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.ir.text import enough_bytes, format_bytes, from_json, parse_bytes, to_json
from pipeloom.schedules.formats import parse_schedule

NINES = "9" * 5000
EMPTY = replace(PLAN, stages=(), placement=(0,), schedule_rows=("0F0 0B0",), caps=())


def parse_plan(text: str) -> Plan:
    return from_json(text, Plan, what="plan.json")


@pytest.mark.parametrize(
    ("read", "text", "error", "word"),
    [
        *(
            (read, text, ScheduleError, "999")
            for read in (parse_action, partial(parse_action, in_program=True))
            for text in (f"F{NINES}", f"0F{NINES}", f"{NINES}F1_0")
        ),
        (parse_schedule, f"0F0,0F{NINES}\n", ScheduleError, "row 1, cell 2"),
        (parse_schedule, "0F0," + "x" * 200_000, ScheduleError, "field limit"),
        (parse_plan, f'{{"graph": "g", "planner": "p", "stages": "{NINES}"}}', ConfigError, r"\$.stages"),
        (parse_plan, to_json(EMPTY).replace("flush", NINES), ConfigError, r"\$.weights"),
    ],
)
def test_long_texts_are_refused_in_a_short_message(read, text, error, word) -> None:
    with pytest.raises(error, match=word) as caught:
        read(text)
    assert len(caught.value.message) < (600 if read is parse_plan else 200)


def test_a_plan_without_stages_is_refused() -> None:
    with pytest.raises(PlanError, match="no stages"):
        _ = EMPTY.as_schedule


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0F999999999", "rank 0 never runs 0F1"),
        ("0F0 0B0 0F1 0F999999999", "rank 0 never runs 0B1, nor 0I1 and 0W1"),
        ("0F0 0I0 0F999999999", "rank 0 never runs 0W0"),
        ("0F0 0F0 0F999999999", "rank 0 runs 0F0 twice"),
    ],
)
def test_a_large_number_costs_no_memory(row: str, message: str) -> None:
    made = Schedule(name="", microbatches=10**9, placement=(0,), rows=parse_rows((row,)))
    tracemalloc.start()
    with pytest.raises(ScheduleError) as caught:
        check(made, chain(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.message == message
    assert peak < 2**24


def test_a_lone_carriage_return_ends_a_row_of_a_file() -> None:
    assert str(parse_schedule("0F0,0B0\r1F0,1B0\r\n")) == "0F0 0B0\n1F0 1B0"


@pytest.mark.parametrize("line", ["0F0&0F0", "0F0 0F0&0B0", "0F0&0B0 0F0", "0F0&0F0 0F0&0F0"])
def test_an_action_alone_and_in_a_pair_prints_as_it_is_read(line: str) -> None:
    """It printed as `0F0&0F0&`, which cannot be read."""
    pairs = parse_pairs((line,))
    made = Schedule(name="text", microbatches=1, placement=(0,), rows=parse_rows((line,)), pairs=pairs)
    assert str(made) == line


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
        ("0MiB", "less than a byte"),
        (0, "less than a byte"),
        ("0.3B", "less than a byte"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_bytes(text)


def test_for_people():
    assert [format_bytes(n) for n in (0, 1023, 1024, 10**9)] == ["0 B", "1023 B", "1.0 KiB", "953.7 MiB"]


@given(size=st.integers(1, 10**14))
def test_what_is_printed_can_be_typed_in_again(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.051)
    assert size <= parse_bytes(enough_bytes(size)) <= max(size + 1, size * 1.011)
