"""What holds for every test of this process. The one that only hands out tests to others loads no torch."""

import sys
import typing
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_exports() -> Iterator[None]:
    import quick_exports

    with pytest.MonkeyPatch.context() as patch:
        quick_exports.use(patch)
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[typing.Any]:
    """One for a process: Playwright runs but one at a time in a thread."""
    from browser import chromium

    with chromium() as one:
        yield one


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n)` n cases, evenly spread, are quick and the others are slow; of one marked
    `sampled("a", "b")` the cases with these ids are quick."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        chosen = of_one_test[0].get_closest_marker("sampled").args
        quick = set(chosen)
        if isinstance(chosen[0], int):
            quick = {of_one_test[i * len(of_one_test) // chosen[0]].callspec.id for i in range(chosen[0])}
        for item in of_one_test:
            if item.callspec.id not in quick:
                item.add_marker("slow")


@pytest.fixture(autouse=True)
def captures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pipelines on threads share captures and traces, unless a test is marked `own_captures`."""
    if request.node.get_closest_marker("own_captures"):
        yield
        return
    import runs

    with runs.shared_captures():
        yield


@pytest.fixture(autouse=True)
def one_schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test is marked `whole_search`, planner auto takes 1F1B where no schedule is named, as most
    tests are about something else: then it plans in little time, and alike."""
    if not request.node.get_closest_marker("whole_search"):
        from pipeloom.planner import planners

        quick = planners.JointPlanner(schedules=lambda _: ("1f1b",), axes=("cuts",), planners=("exact",))
        auto = planners.PLANNERS["auto"]
        monkeypatch.setitem(planners.PLANNERS, "auto", replace(auto, plan=quick))


@pytest.fixture(autouse=True)
def forget_operations() -> Iterator[None]:
    """Kinds of actions and operations that a test declares are gone behind it."""
    from pipeloom.ir.action import KINDS
    from pipeloom.ir.operation import OPERATIONS
    from pipeloom.viewer.labels import label

    with patch.dict(KINDS), patch.dict(OPERATIONS):
        yield
    label.cache_clear()
    sys.modules.pop("own_schedule", None)  # so that loading the example again declares its operation again


@pytest.fixture(autouse=True)
def forget_warnings() -> Iterator[None]:
    from pipeloom.tracer.guards import warn_once

    yield
    warn_once.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run; see `commands.prepare`."""
    import commands

    return commands.prepare(tmp_path, monkeypatch)


@pytest.fixture
def quick_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that predict a step, and do not look at its times."""
    monkeypatch.setattr("pipeloom.forecast.ENOUGH_S", 0.0)
    for name, count in dict(ECHOES=3, ROUNDS=5, MEETINGS=3).items():
        monkeypatch.setattr(f"pipeloom.runtime.calibrate.{name}", count)
