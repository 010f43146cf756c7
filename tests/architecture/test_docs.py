"""The pages name what there is: files, links, and functions in the files that they are said to be in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pipeloom.cli import main

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "pipeloom"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "planners").glob("*.md")),
]

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/(?:[\w-]+\.(?:py|md|toml))?)`")
PLACED = re.compile(r"`([A-Za-z_][\w.]*)`\s+(?:\(|in |of )`([\w/]+/\w+\.py)`")
WRITTEN_BY_RUNS = {"runs/", "checkpoint/", "step-00000300/", "build/docs/"}


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def names_in(file: Path) -> set[str]:
    """What a file defines, by its last name: functions, classes, their methods, and module constants."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return defined | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def untrue(page: Path) -> Iterator[str]:
    text = page.read_text()
    for target, anchor in LINK.findall(text):
        linked = page.parent / target if target else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            yield f"link to {target}{anchor}"
    for name in set(FILE.findall(text)) - WRITTEN_BY_RUNS:
        if not any((folder / name).exists() for folder in (ROOT, PACKAGE, PACKAGE / "schedules")):
            yield f"file {name}"
    for name, file in PLACED.findall(text):
        homes = [folder / file for folder in (ROOT, PACKAGE) if (folder / file).is_file()]
        if homes and name.rpartition(".")[2] not in names_in(homes[0]):
            yield f"{name} in {file}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_there_is(page: Path) -> None:
    assert not list(untrue(page))


def test_untrue_pages_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](gone.md), `ir/gone.py`, `Gone.step` (`ir/plan.py`), `Plan` (`ir/plan.py`)\n")
    assert list(untrue(page)) == ["link to gone.md", "file ir/gone.py", "Gone.step in ir/plan.py"]


def test_the_readme_lists_every_command() -> None:
    table = (ROOT / "README.md").read_text().partition("## Commands")[2].partition("##")[0]
    rows = {
        row.split()[1].rstrip("`"): row for row in re.findall(r"^\| (`pipeloom .*)$", table, re.MULTILINE)
    }
    assert set(rows) == set(main.commands)
    for name, command in main.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {}
        missing = {word for word in inner if not re.search(rf"`(pipeloom {name} )?{word}\b", rows[name])}
        assert not missing, f"pipeloom {name}"


def test_results_name_the_scripts_that_are_there_and_mark_the_others() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    named = {(script, bool(mark)) for script, mark in re.findall(r"`python (bench/\w+\.py)[^`]*`( †)?", text)}
    assert named and all((ROOT / script).exists() != gone for script, gone in named), named
