"""Machine code that is made beside a capture."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeloom.api import compiling


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

    def kill(self) -> None:
        self.ended = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    """The processes started, in a machine with two cores where every capture takes long."""
    Started.all = []
    monkeypatch.setattr(compiling.subprocess, "Popen", Started)
    monkeypatch.setattr(compiling, "_cores", lambda: 2)
    monkeypatch.setattr(compiling, "AFTER_S", 0.0)
    yield Started.all


def until_started(started: list[Started]) -> None:
    while not started:
        pass


def test_a_long_capture_has_the_code_made_and_may_wait_for_it(started: list[Started]) -> None:
    with compiling.made_beside("dawnpiper", ("recompute",)) as wait:
        until_started(started)
        assert started[0].waited_s == []
        wait()
        assert started[0].waited_s == [compiling.LIMIT_S] and not started[0].ended
    assert started[0].command[1:] == ["-P", "-m", "pipeloom.api.compiling", "dawnpiper", "recompute"]
    assert started[0].ended


def test_a_capture_that_fails_leaves_no_process(started: list[Started]) -> None:
    with pytest.raises(ZeroDivisionError), compiling.made_beside("probe"):
        until_started(started)
        raise ZeroDivisionError
    assert started[0].ended and started[0].waited_s == [None]


def test_a_short_capture_starts_nothing(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "AFTER_S", 60.0)
    with compiling.made_beside("dawnpiper") as wait:
        wait()
    assert not started


def test_nothing_is_made_for_searches_without_it_or_on_one_core(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiling.made_beside("pipedream"):
        pass
    with compiling.made_beside("dawnpiper", ()):
        pass
    monkeypatch.setattr(compiling, "_cores", lambda: 1)
    with compiling.made_beside("dawnpiper"):
        pass
    assert not started


def test_nothing_is_compiled_where_it_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []
    monkeypatch.setattr(compiling, "make_plan", lambda *_, strategy, **__: planned.append(strategy))
    monkeypatch.setattr(compiling.sweep, "COMPILE_AFTER", 1)
    monkeypatch.setattr(compiling.sweep, "MADE_AFTER", 1)
    monkeypatch.setattr(compiling.sweep, "_sweeps", SimpleNamespace(kept=False))
    compiling.make("dawnpiper")
    assert not planned
    monkeypatch.setattr(compiling.sweep, "_sweeps", SimpleNamespace(kept=True))
    compiling.make("dawnpiper")
    assert set(planned) == {"dawnpiper"}


LARGE = """
    import sys
    sys.path.insert(0, {bench!r})
    from layered import layered
    from pipeloom.planner import PlanOptions, find_cluster, make_plan
    from pipeloom.profiler.roofline import roofline
    graph = layered(40)
    cluster = find_cluster("8 x a100-40 with 1500MiB")
    plan = make_plan(
        graph, roofline(graph, cluster.devices[0]), cluster, stages=8, schedule="1f1b", microbatches=64,
        strategy="dawnpiper", options=PlanOptions(),
    )
    assert sum(s.recomputed_bytes + s.offloaded_bytes for s in plan.stages)
"""


@pytest.mark.slow
def test_a_large_search_finds_all_its_code(tmp_path: Path) -> None:
    """A search that frees memory on every stage compiles nothing."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "pipeloom.api.compiling", "dawnpiper"], env=env, check=True)
    made = set(tmp_path.rglob("*.nbc"))
    assert any("pick_all" in file.name for file in made) and any("_sweeps" in file.name for file in made)
    bench = str(Path(__file__).parents[2] / "bench")
    large = textwrap.dedent(LARGE).format(bench=bench)
    subprocess.run([sys.executable, "-c", large], env=env, check=True)
    assert set(tmp_path.rglob("*.nbc")) == made
