"""Machine code that is made beside a capture."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeloom import kernel_compilation
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.memory_policy import Treatment
from pipeloom.kernel_compilation import kernels_compiled_beside

SMALL = kernel_compilation.small_model()
COMMAND = [sys.executable, "-P", "-c", kernel_compilation.CODE, "dawnpiper"]


class Started:
    """In place of a process that compiles for as long as it is let."""

    def __init__(self, command: list[str], **options: object) -> None:
        self.command, self.ended = command, False
        self.waited_s: list[float | None] = []
        everything_started.append(self)

    def wait(self, timeout: float | None = None) -> int:
        self.waited_s.append(timeout)
        if timeout is not None and not self.ended:
            raise subprocess.TimeoutExpired(self.command, timeout)
        return 0

    def communicate(self) -> None:
        self.wait()

    def kill(self) -> None:
        self.ended = True


everything_started: list[Started] = []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Started]]:
    """The processes started, on a machine with two cores."""
    everything_started.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_compilation.subprocess, "Popen", Started)
    monkeypatch.setattr(kernel_compilation, "usable_cores", lambda: 2)
    yield everything_started


def test_the_code_is_waited_for_where_the_graph_is_large(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernels_compiled_beside("dawnpiper", ("recompute",)) as wait:
        (process,) = started
        wait(SMALL)
        assert process.waited_s == [] and process.command[-2:] == ["dawnpiper", "recompute"]
        monkeypatch.setattr(kernel_compilation, "LARGE_OPS", len(SMALL.ops))
        wait(SMALL)
        assert process.waited_s == [kernel_compilation.LIMIT_S] and not process.ended
    assert process.ended


def test_a_capture_that_fails_leaves_no_process(started: list[Started]) -> None:
    with pytest.raises(ZeroDivisionError), kernels_compiled_beside("dawnpiper"):
        raise ZeroDivisionError
    assert started[0].ended and started[0].waited_s == [None]


def test_a_process_that_cannot_be_started_is_done_without(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str], **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(kernel_compilation.subprocess, "Popen", refuse)
    with kernels_compiled_beside("dawnpiper") as wait:
        wait(SMALL)
    assert not started


def test_nothing_is_started_where_it_gains_nothing(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For planners that treat nothing, where it was done before, on one core."""

    def starts(name: str, treatments: tuple[Treatment, ...] | None = None) -> bool:
        before = len(started)
        with kernels_compiled_beside(name, treatments):
            return len(started) > before

    assert starts("dawnpiper") and not starts("pipedream") and not starts("dawnpiper", ())
    monkeypatch.setattr(kernel_compilation, "code_is_kept", lambda: False)
    kernel_compilation.compile_kernels_for("dawnpiper")
    assert not starts("dawnpiper") and starts("dawnpiper", ("recompute",))
    # Nor is it tried again where the small model does not fit, as with offloading only.
    monkeypatch.setattr(kernel_compilation, "code_is_kept", lambda: True)
    monkeypatch.setattr(kernel_compilation, "compile_at_once", lambda: None)
    with pytest.raises(InfeasibleError):
        kernel_compilation.plan_small("dawnpiper", kernel_compilation.MEMORY[-1], ("offload",))
    kernel_compilation.compile_kernels_for("dawnpiper", ("offload",))
    assert not starts("dawnpiper", ("offload",))
    monkeypatch.setattr(kernel_compilation, "usable_cores", lambda: 1)
    assert not starts("dawnpiper", ("recompute",))


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
