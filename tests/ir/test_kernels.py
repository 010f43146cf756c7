"""When a kernel runs compiled, and which machine code it finds."""

from pathlib import Path

import pytest
from processes import output

from pipeloom.ir.kernels import COMPILED_FROM, LOADED_FROM, kernel

SQUARES = """
from __future__ import annotations
import sys
import numpy as np
from pipeloom.ir.kernels import kernel
from inner import FACTOR, Row, square

@kernel
def squares(row: Row):
    found = 0
    for at in range(len(row.values)):
        found += square(row.values, at)
    return found * FACTOR

for _ in range(2):
    print(squares(Row(np.full(int(sys.argv[1]), 2), np.zeros(0, np.int64))), "numba" in sys.modules)
"""
INNER = """
from typing import Any, NamedTuple
from pipeloom.ir.kernels import kernel

FACTOR = 1

class Row(NamedTuple):
    values: Any
    weights: Any

@kernel
def square(values, at):
    return values[at] ** 2
"""


def ran(folder: Path, size: int, inner: str = INNER) -> tuple[list[str], int]:
    """What two calls print, and how many entries the cache then has."""
    (folder / "squares.py").write_text(SQUARES)
    (folder / "inner.py").write_text(inner)
    cache = folder / "cache"
    told = output("-B", "squares.py", size, cwd=folder, env={"NUMBA_CACHE_DIR": str(cache)})
    return told.splitlines(), len(list(cache.rglob("*.nbc")))


@pytest.mark.slow
def test_a_kernel_is_compiled_once_it_has_gone_over_enough(tmp_path: Path) -> None:
    assert ran(tmp_path, COMPILED_FROM // 2 - 1) == ([f"{4 * (COMPILED_FROM // 2 - 1)} False"] * 2, 0)
    half = 4 * (COMPILED_FROM // 2)
    assert ran(tmp_path, COMPILED_FROM // 2) == ([f"{half} False", f"{half} True"], 1)
    assert ran(tmp_path, COMPILED_FROM) == ([f"{4 * COMPILED_FROM} True"] * 2, 1)


@pytest.mark.slow
def test_machine_code_is_made_anew_when_what_goes_into_it_changes(tmp_path: Path) -> None:
    """A kernel that it calls, a constant, the type of an argument: in a file other than its own."""
    size = COMPILED_FROM
    changes = (
        (INNER, 4),
        (INNER.replace("** 2", "** 3"), 8),
        (INNER.replace("FACTOR = 1", "FACTOR = 5"), 20),
        (INNER.replace("    values: Any\n    weights: Any", "    weights: Any\n    values: Any"), 0),
    )
    for number, (inner, each) in enumerate(changes, 1):
        assert ran(tmp_path, size, inner) == ([f"{each * size} True"] * 2, number)
    assert ran(tmp_path, size) == ([f"{4 * size} True"] * 2, number)


TWO = """
import sys
import numpy as np
from pipeloom.ir.kernels import kernel

@kernel
def first(values):
    return values[0]

@kernel
def second(values):
    return values[0]

first(np.ones(int(sys.argv[1])))
second(np.ones(int(sys.argv[2])))
print(second.form(0) is second.interpreted)
"""


@pytest.mark.slow
def test_kept_machine_code_is_loaded_from_fewer_elements_once_numba_is(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    nowhere = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": "/proc/none"}
    for sizes, env, interpreted in (
        ((COMPILED_FROM, LOADED_FROM), nowhere, True),  # nothing can be kept
        ((COMPILED_FROM, LOADED_FROM), cache, True),  # nothing is kept
        ((1, COMPILED_FROM), cache, False),
        ((COMPILED_FROM, LOADED_FROM), cache, False),
        ((COMPILED_FROM, LOADED_FROM - 1), cache, True),
        ((COMPILED_FROM - 1, LOADED_FROM), cache, True),  # numba is not loaded
    ):
        assert output("-B", "two.py", *sizes, cwd=tmp_path, env=env) == f"{interpreted}\n", (sizes, env)


def test_who_calls_a_kernel_may_say_how_much_it_goes_over() -> None:
    @kernel
    def first(values):
        return values[0]

    assert first.form(COMPILED_FROM - 1) is first.interpreted
    assert first((3, 4)) == 3
    assert first.form(1) is first.compiled


@pytest.mark.slow
def test_a_cache_of_another_version_is_not_read(tmp_path: Path) -> None:
    for types in ("before", "after"):
        (tmp_path / f"{types}.py").write_text(INNER)
        (tmp_path / "work.py").write_text(SQUARES.replace("inner", types))
        assert output("-c", "import work", COMPILED_FROM, cwd=tmp_path).split()[0] == f"{4 * COMPILED_FROM}"
        (tmp_path / f"{types}.py").unlink()
