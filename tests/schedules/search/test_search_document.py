"""The files and commands of docs/schedule-search.md work as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeloom.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "schedule-search.md").read_text()


def test_all_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (toml,), (python,) = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("toml", "python"))
    (tmp_path / "stages.toml").write_text(toml)
    (tmp_path / "own.py").write_text(python)
    rows = re.findall(r"^    (\dF0 .*)$", PAGE, re.MULTILINE)
    assert len(rows) == 2
    (tmp_path / "paired.txt").write_text("\n".join(rows))
    commands = re.findall(r"^    pipeloom (schedule .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 11
    for command in commands:
        result = CliRunner().invoke(main, command.split())
        assert result.exit_code == 0, f"{command}\n{result.output}"


def test_the_rows_are_those_of_the_recipe(tmp_path: Path) -> None:
    (python,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "own_again.py").write_text(python)
    name = f"{tmp_path / 'own_again.py'}:paired"
    out = tmp_path / "rows.txt"
    words = ["schedule", "export", name, "-p", "2", "-m", "4", "-o", str(out)]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert all(f"    {row}\n" in PAGE for row in out.read_text().splitlines())
