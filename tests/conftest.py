"""What holds for every test of this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import runs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n)` only n cases, evenly spread, are quick; the others are slow."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        count = of_one_test[0].get_closest_marker("sampled").args[0]
        quick = {index * len(of_one_test) // count for index in range(count)}
        for index, item in enumerate(of_one_test):
            if index not in quick:
                item.add_marker("slow")


@pytest.fixture(autouse=True)
def captures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pipelines on threads share captures and traces, unless a test is marked `own_captures`."""
    if request.node.get_closest_marker("own_captures"):
        yield
        return
    with runs.shared_captures():
        yield
