"""The edits of bench/old_faults.toml still fit the source, and the tests that they name are there."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = tomllib.loads((ROOT / "bench" / "old_faults.toml").read_text())["fault"]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault["what"] for fault in FAULTS])
def test_edits_fit_the_source_and_tests_are_there(fault: dict) -> None:
    for edit in fault["edit"]:
        text = (ROOT / "src" / "pipeloom" / edit["file"]).read_text()
        assert text.count(edit["fixed"]) == 1, f"{edit['file']} has not once: {edit['fixed']}"
        assert edit["faulty"] != edit["fixed"]
    for test in fault["tests"]:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name.partition("[")[0] in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_every_number_has_a_fault() -> None:
    """But 16, a fault of a checkpoint format that is no longer read."""
    assert {number for fault in FAULTS for number in fault["numbers"]} == {*range(1, 29)} - {16}
