"""What `pipeloom` exports, pinned: a change here is a change for every user."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeloom

ROOT = Path(__file__).parents[2]

PUBLIC = (
    "Cluster Device Job Link Options Pipeline PipeloomError Plan PlanSettings __version__ capture load_plan "
    "plan profile search_schedule simulate torch_stages verify"
).split()


def test_public_names_are_pinned() -> None:
    assert pipeloom.__all__ == dir(pipeloom) == PUBLIC


def test_every_public_name_loads_from_here_and_no_other_does() -> None:
    homes = {name: getattr(getattr(pipeloom, name), "__module__", "pipeloom") for name in PUBLIC}
    assert all(home.startswith("pipeloom") for home in homes.values()), homes
    with pytest.raises(AttributeError, match="plann"):
        pipeloom.plann  # noqa: B018


def test_a_name_is_loaded_only_when_it_is_used() -> None:
    code = "import sys, pipeloom; assert 'pipeloom.ir.cluster' not in sys.modules; pipeloom.Cluster; "
    code += "assert 'pipeloom.ir.cluster' in sys.modules and 'pipeloom.ir.plan' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_changelog_has_this_version_once_it_is_released() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1:2] in ([], [pipeloom.__version__])


DOORS = ("pipeloom.schedule_language", "pipeloom.integrations.")
"""Modules that scripts import besides the package itself."""

INNER = {"own_schedule.py": "an operation's handler names the context that the runtime gives it"}
"""Examples that import rooms of pipeloom, and why they have to."""


def inner_names(source: str) -> Iterator[str]:
    """What a script uses of pipeloom besides the public names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pipeloom."))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "pipeloom":
                yield from (f"pipeloom.{a.name}" for a in node.names if a.name not in PUBLIC)
            elif node.module.startswith("pipeloom.") and not node.module.startswith(DOORS):
                yield node.module
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "pipeloom" and node.attr not in PUBLIC:
                yield f"pipeloom.{node.attr}"


def shown_code() -> Iterator[tuple[str, str]]:
    """Name and code of what users are shown to begin with."""
    for file in sorted((ROOT / "examples").glob("*.py")):
        yield file.name, file.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    yield from ((f"README.md, block {number}", block) for number, block in enumerate(blocks))


def test_examples_use_public_names_only() -> None:
    used = {name: set(inner_names(code)) for name, code in shown_code()}
    assert len(used) >= 4 and "README.md, block 0" in used
    assert {name for name, inner in used.items() if inner} == set(INNER), used


# One name, one thing: no two public classes of the package are called the same.


PACKAGE = Path(pipeloom.__file__).parent


def classes_by_name(package: Path) -> dict[str, list[str]]:
    """Public class -> the files that define one of this name."""
    files = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(file.relative_to(package)))
    assert files, f"no class found in {package}: this check would pass on nothing"
    return files


def test_no_two_public_classes_have_one_name() -> None:
    twice = {name: files for name, files in classes_by_name(PACKAGE).items() if len(files) > 1}
    assert not twice, f"a reader who looks for one of these finds another: {twice}"


def test_no_room_shares_its_name_with_a_public_name() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert not rooms & set(pipeloom.__all__), "one would hide the other"
