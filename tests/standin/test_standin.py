"""Runs `cases`, each file in a process that has the stand-in accelerator."""

from __future__ import annotations

import shutil
import sys
from os import environ
from pathlib import Path

import processes
import pytest

CASES = Path(__file__).parent / "cases"
SLOW = {"check_pipelines.py"}


def parts() -> list[object]:
    files = sorted(path.name for path in CASES.glob("check_*.py"))
    assert len(files) > 3
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in files]


@pytest.mark.parametrize("name", parts())
def test_the_stand_in(name: str) -> None:
    if sys.platform != "linux":
        pytest.skip("the stand-in accelerator needs Linux: it maps memory twice")
    if shutil.which(environ.get("CXX", "g++")) is None:
        pytest.skip("the stand-in accelerator needs a C++ compiler: no g++ here, and CXX names none")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", CASES / name)
    status, said, errors = processes.run(*words, env={"STANDIN": "1"})
    assert status == 0, said + errors
