"""Machine code that is made beside a capture."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeloom import kernel_compilation
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.memory_policy import Treatment

SMALL = kernel_compilation.small_model()


class Started:
    """In place of a process that compiles for as long as it is let."""

    all: list["Started"] = []

    def __init__(self, command: list[str], **options: object) -> None:
        self.command = command
        self.waited_s: list[float | None] = []
        self.ended = False
        Started.all.append(self)

    def wait(self, timeout: float | None = None) -> int:
        self.waited_s.append(timeout)
        if timeout is not None and not self.ended:
            raise subprocess.TimeoutExpired(self.command, timeout)
        return 0

    def communicate(self) -> None:
        self.wait()

    def kill(self) -> None:
        self.ended = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Started]]:
    """The processes started, on a machine with two cores."""
    Started.all = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_compilation.subprocess, "Popen", Started)
    monkeypatch.setattr(kernel_compilation, "usable_cores", lambda: 2)
    yield Started.all


def test_the_code_is_waited_for_where_the_graph_is_large(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernel_compilation.kernels_compiled_beside("dawnpiper", ("recompute",)) as wait:
        (process,) = started
        wait(SMALL)
        assert process.waited_s == [] and process.command[-2:] == ["dawnpiper", "recompute"]
        monkeypatch.setattr(kernel_compilation, "LARGE_OPS", len(SMALL.ops))
        wait(SMALL)
        assert process.waited_s == [kernel_compilation.LIMIT_S] and not process.ended
    assert process.ended


def test_a_capture_that_fails_leaves_no_process(started: list[Started]) -> None:
    with pytest.raises(ZeroDivisionError), kernel_compilation.kernels_compiled_beside("dawnpiper"):
        raise ZeroDivisionError
    assert started[0].ended and started[0].waited_s == [None]


def test_a_process_that_cannot_be_started_is_done_without(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str], **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(kernel_compilation.subprocess, "Popen", refuse)
    with kernel_compilation.kernels_compiled_beside("dawnpiper") as wait:
        wait(SMALL)
    assert not started


def test_nothing_is_started_where_it_gains_nothing(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For planners that treat nothing, where it was done before, on one core."""

    def starts(name: str, treatments: tuple[Treatment, ...] | None = None) -> bool:
        before = len(started)
        with kernel_compilation.kernels_compiled_beside(name, treatments):
            return len(started) > before

    assert starts("dawnpiper") and not starts("pipedream") and not starts("dawnpiper", ())
    monkeypatch.setattr(kernel_compilation, "code_is_kept", lambda: False)
    kernel_compilation.compile_kernels_for("dawnpiper")
    assert not starts("dawnpiper") and starts("dawnpiper", ("recompute",))
    monkeypatch.setattr(kernel_compilation, "usable_cores", lambda: 1)
    assert not starts("dawnpiper", ("recompute",))


def test_it_is_not_tried_again_where_the_small_model_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with offloading only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_compilation, "code_is_kept", lambda: True)
    monkeypatch.setattr(kernel_compilation, "compile_at_once", lambda: None)
    with pytest.raises(InfeasibleError):
        kernel_compilation.plan_small("dawnpiper", kernel_compilation.MEMORY[-1], ("offload",))
    kernel_compilation.compile_kernels_for("dawnpiper", ("offload",))
    (note,) = tmp_path.rglob("kernels/*")
    assert note.is_file()


LARGE = """
from layered import layered
from pipeloom.clusters.names import find_cluster
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.make_plan import make_plan
from pipeloom.profiler.roofline import roofline

graph = layered(40)
cluster = find_cluster("8 nodes of 1 x a100-40 with 1500MiB")
plan = make_plan(
    graph, roofline(graph, cluster.devices[0]), cluster, PlanOptions(),
    ranks=8, schedule="1f1b", microbatches=64, planner="dawnpiper",
)
assert sum(stage.recomputed_bytes + stage.offloaded_bytes for stage in plan.stages)
"""


@pytest.mark.slow
def test_a_large_search_finds_all_its_code(tmp_path: Path) -> None:
    """A search that frees memory on every stage compiles nothing."""
    bench = str(Path(__file__).parents[2] / "bench")
    path = os.pathsep.join(filter(None, (bench, os.environ.get("PYTHONPATH"))))
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "code"), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": path}
    env = {**os.environ, **kept}
    command = [sys.executable, "-P", "-c", kernel_compilation.CODE, "dawnpiper"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as process:
        assert process.wait(600) == 0
    made = set(tmp_path.rglob("*.nbc"))
    assert any("pick_all" in file.name for file in made) and any("run_sharing" in file.name for file in made)
    subprocess.run([sys.executable, "-c", LARGE], env=env, check=True)
    assert set(tmp_path.rglob("*.nbc")) == made


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", kernel_compilation.CODE, "dawnpiper"]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as process:
        process.communicate(timeout=60)  # closes the pipe
        assert process.returncode == kernel_compilation.PARENT_ENDED
