"""`| head -1`: what is not read any more."""

import subprocess
import sys
from pathlib import Path

import pytest

PIPELOOM = [sys.executable, "-m", "pipeloom", "schedule"]
GOOD = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n"


@pytest.mark.parametrize(("rows", "status"), [(GOOD, 0), (GOOD.replace("1B0 ", ""), 1)])
def test_the_exit_status_is_that_of_the_check(tmp_path: Path, rows: str, status: int) -> None:
    """`| head -1`: what is not read any more changes neither the exit status nor the files that are
    written."""
    (tmp_path / "s.txt").write_text(rows)
    command = subprocess.Popen(
        [*PIPELOOM, "check", "s.txt", "--html", "s.html"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout is not None
    command.stdout.close()  # nobody reads from the first byte on
    _, told = command.communicate(timeout=300)
    assert command.returncode == status, told
    assert b"Traceback" not in told and b"Broken" not in told
    assert (tmp_path / "s.html").is_file() == (status == 0)
