"""Compiled kernels that are kept on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = """
import numpy as np
from {types} import Row
from pipeloom.ir.kernels import kernel

@kernel
def total(row):
    found = 0
    for value in row.values:
        found += value
    return found

print(total(Row(np.ones(1_000_000, np.int64))))
"""
TYPES = """
from typing import Any, NamedTuple

class Row(NamedTuple):
    values: Any
"""


@pytest.mark.slow
def test_a_cache_of_another_version_is_not_read(tmp_path: Path) -> None:
    for types in ("before", "after"):
        (tmp_path / f"{types}.py").write_text(TYPES)
        (tmp_path / "work.py").write_text(KERNEL.format(types=types))
        done = subprocess.run(
            [sys.executable, "-c", "import work"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.stdout == "1000000\n", done.stderr
        (tmp_path / f"{types}.py").unlink()
