"""Texts that were answered with a traceback, pages of digits or all memory, found by `tests/fuzz`."""

from __future__ import annotations

import tracemalloc

import pytest

from pipeloom.checks.schedules import check
from pipeloom.ir.action import parse_action, parse_instruction
from pipeloom.ir.errors import ConfigError, PlanError, ScheduleError
from pipeloom.ir.json_codec import from_json, to_json
from pipeloom.ir.plan import Plan
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.schedules.formats.csv import parse_schedule


@pytest.mark.parametrize("text", ["F" + "9" * 5000, "0F" + "9" * 5000, "9" * 5000 + "F1_0"])
def test_messages_repeat_only_the_beginning_of_long_texts(text: str) -> None:
    for read in (parse_action, parse_instruction):
        with pytest.raises(ScheduleError) as caught:
            read(text)
        assert len(str(caught.value)) < 200


def test_numbers_of_any_length_in_a_file_are_refused() -> None:
    with pytest.raises(ScheduleError, match="row 1, cell 2: cannot read '0F999"):
        parse_schedule(f"0F0,0F{'9' * 5000}\n")


def test_a_lone_carriage_return_ends_a_row_of_a_file() -> None:
    assert str(parse_schedule("0F0,0B0\r1F0,1B0\r\n")) == "0F0 0B0\n1F0 1B0"


def test_a_cell_of_any_length_is_refused() -> None:
    with pytest.raises(ScheduleError, match="this is no CSV text: field larger than field limit"):
        parse_schedule("0F0," + "x" * 200_000)


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
    """Tables of all micro-batches took 4 GB each before the first missing one was named."""
    made = Schedule(name="", microbatches=10**9, placement=(0,), rows=parse_rows((row,)))
    tracemalloc.start()
    with pytest.raises(ScheduleError) as caught:
        check(made, chain(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.message == message
    assert peak < 2**24


def test_a_plan_without_stages_is_refused() -> None:
    empty = Plan(
        graph="",
        planner="",
        stages=(),
        placement=(0,),
        schedule="1f1b",
        schedule_rows=("0F0 0B0",),
        microbatches=1,
    )
    with pytest.raises(PlanError, match="this plan has no stages"):
        _ = empty.as_schedule


def test_a_long_value_in_a_plan_file_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="`[$].stages`") as caught:
        from_json(f'{{"graph": "g", "planner": "p", "stages": "{"9" * 5000}"}}', Plan, what="plan.json")
    assert len(str(caught.value)) < 600
    nothing = Plan(
        graph="g", planner="p", stages=(), placement=(), schedule="s", schedule_rows=(), microbatches=1
    )
    as_json = to_json(nothing)
    with pytest.raises(ConfigError, match="`[$].weights`") as caught:
        from_json(as_json.replace("flush", "9" * 5000), Plan, what="plan.json")
    assert len(str(caught.value)) < 600
