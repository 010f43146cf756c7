"""Planning, simulating and drawing import no torch, so they start fast and run anywhere. (What they import by
name import-linter checks; this is what importing them does.)"""

import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom

PACKAGE = Path(pipeloom.__file__).parent
TORCH_FREE = ("ir", "schedules", "lowering", "simulator", "planner", "viewer", "cli.py", "runtime/launch.py")

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imports torch: import it inside the function that needs it, "
                 "or move that function to the tracer, the runtime or the measuring profiler")
"""


def modules() -> list[str]:
    files = [
        file for room in TORCH_FREE for file in sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / room]
    ]
    dotted = [".".join(("pipeloom", *f.relative_to(PACKAGE).with_suffix("").parts)) for f in files]
    return [name.removesuffix(".__init__") for name in dotted]


@pytest.mark.parametrize(("names", "status"), [(["pipeloom", *modules()], 0), (["json", "torch"], 1)])
def test_importing_them_imports_no_torch(names: list[str], status: int) -> None:
    """And the probe sees torch."""
    probe = subprocess.run([sys.executable, "-c", PROBE, *names], capture_output=True, text=True)
    assert probe.returncode == status, probe.stderr
