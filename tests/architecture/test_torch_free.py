"""Planning, simulating and drawing import no torch, so they start fast and run anywhere."""

import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom

PACKAGE = Path(pipeloom.__file__).parent
TORCH_FREE = ("ir", "schedules", "lowering", "simulator", "planner", "viewer", "cli")

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imports torch: import it inside the function that needs it, "
                 "or move that function to the tracer, the runtime or the measuring profiler")
"""


def modules(room: str) -> list[str]:
    files = sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]
    dotted = [".".join(("pipeloom", *f.relative_to(PACKAGE).with_suffix("").parts)) for f in files]
    return [name.removesuffix(".__init__") for name in dotted]


def probe(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROBE, *names], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("room", TORCH_FREE)
def test_importing_a_room_imports_no_torch(room: str) -> None:
    result = probe("pipeloom", *modules(room))
    assert result.returncode == 0, result.stderr


def test_the_probe_sees_torch() -> None:
    result = probe("json", "torch")
    assert result.returncode == 1
    assert result.stderr.startswith("importing torch imports torch")
