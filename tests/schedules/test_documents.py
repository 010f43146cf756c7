"""The examples and commands of the pages on schedules give what stands there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeloom.cli import main

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "least"), [("schedules.md", 5), ("schedule-language.md", 30)])
def test_the_examples_of_a_page(page: str, least: int) -> None:
    failed, tried = doctest.testfile(
        str(DOCS / page), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert not failed and tried > least


def test_the_commands_and_files_of_the_page_on_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "schedule-search.md").read_text()
    (toml,), (python,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("toml", "python"))
    Path("stages.toml").write_text(toml)
    Path("own.py").write_text(python)
    rows = re.findall(r"^    (\dF0 .*)$", page, re.MULTILINE)
    Path("paired.txt").write_text("\n".join(rows))
    commands = re.findall(r"^    pipeloom (schedule .*)$", page, re.MULTILINE)
    assert len(commands) == 11 and len(rows) == 2
    for command in [*commands, "schedule export own.py:paired -p 2 -m 4 -o rows.txt"]:
        result = CliRunner().invoke(main, command.split())
        assert result.exit_code == 0, f"{command}\n{result.output}"
    assert Path("rows.txt").read_text().splitlines() == rows
