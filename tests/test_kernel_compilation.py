"""Machine code that is made beside a capture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom import kernel_compilation

COMMAND = [sys.executable, "-P", "-c", kernel_compilation.CODE, "dawnpiper"]


LARGE = """
from layered import layered
from pipeloom.clusters.names import find_cluster
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.planners import make_plan
from pipeloom.profiler.roofline import roofline

graph = layered(40)
cluster = find_cluster("8 nodes of 1 x a100-40 with 1500MiB")
plan = make_plan(
    graph, roofline(graph, cluster.devices[0]), cluster, PlanOptions(),
    ranks=8, schedule="1f1b", microbatches=64, planner="dawnpiper",
)
assert sum(stage.recomputed_bytes + stage.offloaded_bytes for stage in plan.stages)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    support = str(Path(__file__).parent / "support")  # where `layered` is
    path = os.pathsep.join(filter(None, (support, os.environ.get("PYTHONPATH"))))
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "code"), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": path}
    return {**os.environ, **kept}


@pytest.mark.slow
def test_a_large_search_finds_all_its_code(tmp_path: Path, env: dict[str, str]) -> None:
    """A search that frees memory on every stage compiles nothing."""
    with subprocess.Popen(COMMAND, env=env, stdin=subprocess.PIPE) as process:
        assert process.wait(600) == 0
    made = set(tmp_path.rglob("*.nbc"))
    assert any("pick_all" in file.name for file in made) and any("run_sharing" in file.name for file in made)
    subprocess.run([sys.executable, "-c", LARGE], env=env, check=True)
    assert set(tmp_path.rglob("*.nbc")) == made


def test_the_process_ends_with_the_one_that_started_it(env: dict[str, str]) -> None:
    with subprocess.Popen(COMMAND, env=env, stdin=subprocess.PIPE) as process:
        process.communicate(timeout=60)  # closes the pipe
        assert process.returncode == kernel_compilation.PARENT_ENDED
