"""The grammar of actions and rows: strict, and its errors say what to write instead."""

import re
from pathlib import Path

import pytest
from commands import bad, good

from pipeloom.ir.action import B, parse_action
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.operation import Operation, declare
from pipeloom.schedules.formats import parse_text

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_schedule.py"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0FOO", "micro-batch is missing: write 0F0"),
        ("0F1junk", "nothing behind"),
        ("F0", "the stage is missing: write 0F0"),
        ("0F01", "write 0F1"),
        ("+0F1", "write 0F1"),
        ("-1F0", "numbered from 0"),
        ("\u0660F1", "digits 0-9"),
        ("", "empty"),
        ("0F0,0B0", "blanks"),
        ("0COMPRESSED0", "declared"),
        ("0F" + "9" * 5000, "write stage, kind, micro-batch"),
    ],
)
def test_wrong_actions(text: str, hint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_action(text)
    assert hint in str(caught.value.hint) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text", ["0SEND_F0", "0SEND_F0<1", "01SEND_F0>1", "0SEND_F0>1 ", "0STEP00", "\u0661STEP"]
)
def test_wrong_instructions(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_action(text, in_program=True)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("0F0 0B0\n1F0 1b0", "row 2: cannot read action '1b0'"),
        ("0F0 0B0\n0F1 0B1", "ranks 0 and 1"),
        ("0F0 0B0\n2F0 2B0", "stage 1"),
        ("", "no action"),
        ("0F0 0F1&&0B0", "row 1: cannot read '0F1&&0B0'"),
    ],
)
def test_wrong_texts(text: str, word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        parse_text(text)


def test_a_text_and_what_it_prints() -> None:
    declare(Operation(letters="SYNC", meaning="sync", after=B))
    text = "0F0 0F1&0B0 0SYNC0 0B1 0SYNC1\n1F0 1B0 1SYNC0 1F1 1B1 1SYNC1"
    made = parse_text(f"\n{text}  \n\n")
    assert str(made) == text and made.placement == (0, 1) and made.microbatches == 2


def test_a_file_with_declared_operations_is_checked(tmp_path: Path) -> None:
    """`export` writes what `check` reads, once it is told who declares the operations."""
    file = tmp_path / "mine.txt"
    words = ("schedule", "check", file, "--operations", EXAMPLE)
    good("schedule", "export", f"{EXAMPLE}:compressed", "-p", "2", "-o", file)
    assert "cannot block" in good(*words)
    file.write_text(file.read_text().replace("0W0 0COMPRESS0", "0COMPRESS0 0W0"))
    assert "rank 0 runs 0COMPRESS0 before 0W0" in bad(1, *words)


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ("def mine(s):\n    return half(s)\n\ndef half(s):\n    return 1 / 0\n", r"mine\.py:2, .*mine\.py:5"),
        ("def mine(s:\n", r"mine\.py, line 1: SyntaxError"),
        ("import nowhere_to_be_found\n", r"ModuleNotFoundError.*mine\.py:1"),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_is_told_with_its_lines(lines, word, tmp_path) -> None:
    (file := tmp_path / "mine.py").write_text(lines)
    told = bad(2, "schedule", "show", f"{file}:mine", "-p", "2")
    assert re.search(word, told.replace("\n", "")) and "Traceback" not in told
