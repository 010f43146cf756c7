"""Machine code that is made beside a capture."""

from pathlib import Path
from subprocess import PIPE

import processes
import pytest

from pipeloom import kernel_compilation

WORDS = ["-P", "-c", kernel_compilation.CODE, "dawnpiper"]


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
    return {"NUMBA_CACHE_DIR": str(tmp_path / "code"), "XDG_CACHE_HOME": str(tmp_path)}


@pytest.mark.slow
def test_a_large_search_finds_all_its_code(tmp_path: Path, env: dict[str, str]) -> None:
    """A search that frees memory on every stage compiles nothing."""
    with processes.start(*WORDS, env=env, stdin=PIPE, stdout=None, stderr=None) as process:
        assert process.wait(600) == 0
    made = set(tmp_path.rglob("*.nbc"))
    assert any("pick_all" in file.name for file in made) and any("run_sharing" in file.name for file in made)
    processes.output("-c", LARGE, env=env)
    assert set(tmp_path.rglob("*.nbc")) == made


def test_the_process_ends_with_the_one_that_started_it(env: dict[str, str]) -> None:
    with processes.start(*WORDS, env=env, stdin=PIPE) as process:
        process.communicate(timeout=60)  # closes the pipe
        assert process.returncode == kernel_compilation.PARENT_ENDED
