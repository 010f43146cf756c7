"""Machine code that is made beside a capture."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeloom import kernel_compilation
from pipeloom.ir.errors import InfeasibleError

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
    """The processes started, in a machine with two cores where every capture takes long."""
    Started.all = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_compilation.subprocess, "Popen", Started)
    monkeypatch.setattr(kernel_compilation, "usable_cores", lambda: 2)
    monkeypatch.setattr(kernel_compilation, "AFTER_S", 0.0)
    yield Started.all


def until(some: list[Any], limit_s: float = 60.0) -> None:
    """Wait until a list has something; the limit only ends a test that would hang."""
    end = time.monotonic() + limit_s
    while not some:
        assert time.monotonic() < end, "nothing was started"
        time.sleep(0.001)


def test_a_long_capture_has_the_code_made_and_waits_for_it_if_large(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernel_compilation.kernels_compiled_beside("dawnpiper", ("recompute",)) as wait:
        until(started)
        assert started[0].waited_s == []
        wait(SMALL)
        assert started[0].waited_s == []
        monkeypatch.setattr(kernel_compilation, "LARGE_OPS", len(SMALL.ops))
        wait(SMALL)
        assert started[0].waited_s == [kernel_compilation.LIMIT_S] and not started[0].ended
    assert started[0].command[1:] == ["-P", "-m", "pipeloom.kernel_compilation", "dawnpiper", "recompute"]
    assert started[0].ended


def test_a_capture_that_fails_leaves_no_process(started: list[Started]) -> None:
    with pytest.raises(ZeroDivisionError), kernel_compilation.kernels_compiled_beside("dawnpiper"):
        until(started)
        raise ZeroDivisionError
    assert started[0].ended and started[0].waited_s == [None]


def test_a_process_that_cannot_be_started_is_done_without(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refuse(command: list[str], **options: object) -> None:
        tried.extend(command)
        raise OSError("no more processes")

    monkeypatch.setattr(kernel_compilation.subprocess, "Popen", refuse)
    with kernel_compilation.kernels_compiled_beside("dawnpiper") as wait:
        until(tried)
        wait(SMALL)
    assert not started


def test_a_short_capture_starts_nothing(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_compilation, "AFTER_S", 60.0)
    with kernel_compilation.kernels_compiled_beside("dawnpiper") as wait:
        wait(SMALL)
    assert not started


def test_nothing_is_started_where_it_gains_nothing(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For planners that treat nothing, where it was done before, on one core."""
    timers: list[object] = []
    monkeypatch.setattr(kernel_compilation.Timer, "start", lambda timer: timers.append(timer))
    with kernel_compilation.kernels_compiled_beside("dawnpiper"):
        assert len(timers) == 1
    with (
        kernel_compilation.kernels_compiled_beside("pipedream"),
        kernel_compilation.kernels_compiled_beside("dawnpiper", ()),
    ):
        pass
    monkeypatch.setattr(kernel_compilation, "code_is_kept", lambda: False)
    kernel_compilation.compile_kernels_for("dawnpiper")
    with kernel_compilation.kernels_compiled_beside("dawnpiper"):
        pass
    monkeypatch.setattr(kernel_compilation, "usable_cores", lambda: 1)
    with kernel_compilation.kernels_compiled_beside("dawnpiper", ("recompute",)):
        pass
    assert len(timers) == 1


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
    command = [sys.executable, "-m", "pipeloom.kernel_compilation", "dawnpiper"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as process:
        assert process.wait(600) == 0
    made = set(tmp_path.rglob("*.nbc"))
    assert any("pick_all" in file.name for file in made) and any("run_sharing" in file.name for file in made)
    subprocess.run([sys.executable, "-c", LARGE], env=env, check=True)
    assert set(tmp_path.rglob("*.nbc")) == made


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeloom.kernel_compilation", "dawnpiper"]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as process:
        process.communicate(timeout=60)  # closes the pipe
        assert process.returncode == kernel_compilation.PARENT_ENDED
