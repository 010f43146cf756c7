"""The examples of the pages run as they stand there, and the pages name what there is.

CONTRIBUTING.md says which block is run how.
"""

import doctest
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner

from pipeloom.cli import main

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pipeloom"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

BLOCK = re.compile(r"(?:^<!-- (slow|not run: [^>]+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|toml|txt))\n")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/(?:[\w-]+\.(?:py|md|toml))?)`")
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
WRITTEN_BY_RUNS = {"runs/", "checkpoint/", "step-00000300/"}
TAKE_LONGER = ("planning", "memory-and-offloading", "other-engines", "without-a-flush")
"""Pages whose commands have quick tests of their own."""

ANY_OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    mark: str
    kind: str
    text: str


def blocks(page: Path) -> tuple[dict[str, str], list[Block]]:
    """The files of a page, and its other blocks."""
    found = [Block(*parts) for parts in BLOCK.findall(page.read_text())]
    files = {name[1]: b.text.partition("\n")[2] for b in found if (name := FILE_NAME.match(b.text))}
    return files, [block for block in found if not FILE_NAME.match(block.text)]


class Reader:
    """Follows a page in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "page"}
        (folder / "examples").symlink_to(ROOT / "examples")

    def follow(self, block: Block) -> None:
        if block.kind == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                self.run(line, in_process=block.mark != "slow")
        elif block.kind == "console":
            for command in block.text.split("$ ")[1:]:
                line, _, wanted = command.partition("\n")
                output = self.run(line)
                assert doctest.OutputChecker().check_output(wanted, output, ANY_OUTPUT), f"{line}\n{output}"
        elif block.kind == "python" and block.text.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block.text, self.names, "page", None, 0)
            runner = doctest.DocTestRunner(optionflags=ANY_OUTPUT)
            assert runner.run(test, clear_globs=False).failed == 0
            self.names.update(test.globs)
        elif block.kind == "python":
            exec(block.text, self.names)
        else:
            assert block.kind in ("toml", "text", "json", "diff"), f"what to do with a block of {block.kind}?"

    def run(self, line: str, in_process: bool = True) -> str:
        program, *words = shlex.split(line, comments=True)
        if in_process and program == "pipeloom":
            result = CliRunner().invoke(main, words)
            assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
            return result.stdout
        module = {"pipeloom": "pipeloom", "torchrun": "torch.distributed.run"}[program]
        command = [sys.executable, "-m", module, *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def follow(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, marks: set[str]) -> None:
    monkeypatch.chdir(folder)
    reader = Reader(folder)
    files, others = blocks(page)
    for name, text in files.items():
        (folder / name).write_text(text)
    for block in others:
        if block.mark in marks:
            reader.follow(block)


def pages_with(mark: str) -> pytest.MarkDecorator:
    pages = []
    for page in PAGES:
        if any(block.mark == mark for block in blocks(page)[1]):
            slow = mark == "slow" or page.stem in TAKE_LONGER
            pages.append(pytest.param(page, marks=[pytest.mark.slow] * slow, id=page.stem))
    return pytest.mark.parametrize("page", pages)


@pages_with("")
def test_quick_examples(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(page, tmp_path, monkeypatch, {""})


@pages_with("slow")
def test_slow_examples(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(page, tmp_path, monkeypatch, {"", "slow"})


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def untrue(page: Path) -> Iterator[str]:
    text = page.read_text()
    for target, anchor in LINK.findall(text):
        linked = page.parent / target if target else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            yield f"link to {target}{anchor}"
    for name in {*FILE.findall(text), *re.findall(r"`python (bench/\w+\.py)", text)} - WRITTEN_BY_RUNS:
        if not any((folder / name).exists() for folder in (ROOT, SOURCE)):
            yield f"file {name}"
    for name, function in TEST.findall(text):
        file = ROOT / "tests" / name
        if not file.exists() or f"def {function}(" not in file.read_text():
            yield f"test {name}, {function}"
    for line in re.findall(r"^ {4}(?:\$ )?((?:pipeloom|torchrun) .*)", text, re.MULTILINE):
        yield f"command outside of a block that is run: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_what_there_is(page: Path) -> None:
    assert not list(untrue(page))


def test_the_index_lists_every_page() -> None:
    listed = (ROOT / "docs" / "index.md").read_text().split()
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= set(listed)


def test_code_names_pages_that_exist() -> None:
    files = [f for folder in ("src", "bench", "examples", "tests") for f in (ROOT / folder).rglob("*.py")]
    named = {name for f in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", f.read_text())}
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_the_map_names_what_the_source_defines() -> None:
    source = "\n".join(f.read_text() for f in SOURCE.rglob("*.py"))
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`([A-Z][a-z]\w+|[A-Z_]{4,}S)`", text))
    assert len(names) > 30
    assert not {n for n in names if not re.search(rf"^(class {n}\b|{n}\b.*=)", source, re.MULTILINE)}


def test_getting_started_lists_every_command() -> None:
    text = (ROOT / "docs" / "getting-started.md").read_text().partition("## All commands")[2]
    rows = {row.split()[1].rstrip("`"): row for row in re.findall(r"^\| (`pipeloom .*)$", text, re.MULTILINE)}
    assert set(rows) == set(main.commands)
    for name, command in main.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {}
        missing = {word for word in inner if not re.search(rf"`(pipeloom {name} )?{word}\b", rows[name])}
        assert not missing, f"pipeloom {name}"
