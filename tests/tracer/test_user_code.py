"""Whose a line of code is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ASK = """
import torch
from pipeloom.tracer.user_code import is_user_file
print(is_user_file(torch.__file__), is_user_file("a.py"))
"""


@pytest.mark.slow
def test_files_of_torch_are_not_the_users(tmp_path: Path) -> None:
    """In an environment behind a symbolic link, lines of torch were named as the user's."""
    (tmp_path / "packages").symlink_to(Path(torch.__file__).parents[1])
    path = os.pathsep.join([str(tmp_path / "packages"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.split() == ["False", "True"], done.stderr
