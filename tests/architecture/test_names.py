"""One name, one thing: no two public classes of the package are called the same."""

import ast
from collections import defaultdict
from pathlib import Path

import pipeloom

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
