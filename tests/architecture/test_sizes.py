"""Budgets to notice, not to game: what outgrows them is usually two things in one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES = 400
FUNCTION_LINES = 60
POSITIONAL = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert files, f"no file found in {folders} of {ROOT}: this check would pass on nothing"
    return files


def code_lines(function: Function) -> int:
    """Lines from `def` to the end, the docstring not counted."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and isinstance(first, ast.Expr):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def positional(function: Function) -> int:
    """Arguments that may be given by position, `self` and `cls` not counted."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def oversized(source: str, where: str) -> Iterator[str]:
    lines = source.count("\n")
    if lines >= FILE_LINES:
        yield f"{where} has {lines} lines, the limit is {FILE_LINES - 1}: split it by subject"
    for node in ast.walk(ast.parse(source, where)):
        if not isinstance(node, Function):
            continue
        if code_lines(node) >= FUNCTION_LINES:
            yield (
                f"{where}:{node.lineno} {node.name}() has {code_lines(node)} lines, "
                f"the limit is {FUNCTION_LINES - 1}: name its steps as functions"
            )
        if positional(node) > POSITIONAL:
            yield (
                f"{where}:{node.lineno} {node.name}() takes {positional(node)} positional arguments, "
                f"the limit is {POSITIONAL}: make them keyword-only, or group what belongs together"
            )


def test_files_and_functions_of_the_package_are_small() -> None:
    found = [m for f in python_files("src") for m in oversized(f.read_text(), str(f.relative_to(ROOT)))]
    assert not found, "\n".join(found)


def test_other_files_are_small() -> None:
    long = [
        f"{f.relative_to(ROOT)} has {lines} lines, the limit is {FILE_LINES - 1}: split it by subject"
        for f in python_files("tests", "examples")
        if (lines := f.read_text().count("\n")) >= FILE_LINES
    ]
    assert not long, "\n".join(long)


def test_planted_giants_are_found() -> None:
    body = "    x = 1\n"
    source = (
        f'def long():\n    """Doc."""\n{body * 59}'
        f'def fits():\n    """Doc\n{body * 70}    """\n{body * 58}'
        "def wide(a, b, c, d, e, f, g): ...\n"
        "class C:\n    def m(self, a, b, c, d, e, f, *, g): ...\n"
    )
    assert list(oversized(source, "f.py")) == [
        "f.py:1 long() has 60 lines, the limit is 59: name its steps as functions",
        "f.py:193 wide() takes 7 positional arguments, the limit is 6: "
        "make them keyword-only, or group what belongs together",
    ]
    assert list(oversized("\n" * 400, "f.py")) == [
        "f.py has 400 lines, the limit is 399: split it by subject"
    ]
