"""Commands as users type them, run in this process, in a folder with jobs and a cluster."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeloom.cli import main

CLUSTER = """
[[device]]
name = "slow"
count = 2
memory = "1GiB"
flops_per_s = { float32 = 1e9 }
memory_bytes_per_s = 1e9
[within_node]
bandwidth = "1GB"
"""


def prepare(folder: Path, patch: pytest.MonkeyPatch, cluster: str = CLUSTER) -> Path:
    """Make it the current one, with `mine.py`, a copy of `its_jobs.py`, and `cluster.toml`."""
    shutil.copy(Path(__file__).with_name("its_jobs.py"), folder / "mine.py")
    (folder / "cluster.toml").write_text(cluster)
    patch.chdir(folder)
    patch.setattr(sys, "path", [*sys.path])
    patch.delitem(sys.modules, "mine", raising=False)
    return folder


def run(*words: object) -> Result:
    """What comes of a command, or the error that it did not expect."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def good(*words: object) -> str:
    """Standard output of a command that ends well."""
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def figures(*words: object) -> Any:
    """What it prints with --json."""
    return json.loads(good(*words, "--json"))


def bad(status: int, *words: object) -> str:
    """Standard error of a command that is refused."""
    result = run(*words)
    assert result.exit_code == status, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    return result.stderr
