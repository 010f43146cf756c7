"""When a kernel runs compiled."""

import os
import subprocess
import sys
from pathlib import Path

MODULE = """
import sys
import numpy as np
from pipeloom.ir import kernels

@kernels.within
def square(values, at):
    return values[at] * values[at]

@kernels.in_place
def squares(values):
    found = 0
    for at in range(len(values)):
        found += square(values, at)
    return found

kernels.S_PER_BYTE, kernels.LOADING_S = map(float, sys.argv[2:])
for _ in range(2):
    print(squares(np.ones(int(sys.argv[1]), np.int64)), bool(vars(squares).get("compiled")))
"""


def ran(folder: Path, size: int, s_per_byte: float = 60.0, loading_s: float = 60.0) -> list[str]:
    (folder / "squares.py").write_text(MODULE)
    call = [sys.executable, "squares.py", str(size), str(s_per_byte), str(loading_s)]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_machine_code_is_made_for_large_arrays_and_used_for_smaller_ones_once_there(tmp_path: Path) -> None:
    assert ran(tmp_path, 10_000) == ["10000 False"] * 2
    assert ran(tmp_path, 1_000_000) == ["1000000 True"] * 2
    assert ran(tmp_path, 10_000) == ["10000 True"] * 2


def test_machine_code_is_made_when_the_kernel_has_run_long_without(tmp_path: Path) -> None:
    assert ran(tmp_path, 10_000, s_per_byte=0.0) == ["10000 False", "10000 True"]


def test_small_arrays_run_compiled_too_once_the_kernel_has_run_long(tmp_path: Path) -> None:
    assert ran(tmp_path, 1_000) == ["1000 False"] * 2
    assert ran(tmp_path, 1_000, s_per_byte=0.0) == ["1000 False"] * 2
    assert ran(tmp_path, 1_000, loading_s=0.0) == ["1000 False"] * 2
    assert ran(tmp_path, 100, s_per_byte=0.0, loading_s=0.0) == ["100 False"] * 2
    assert ran(tmp_path, 1_000, s_per_byte=0.0, loading_s=0.0) == ["1000 False", "1000 True"]
    assert ran(tmp_path, 1_000, loading_s=0.0) == ["1000 True"] * 2
