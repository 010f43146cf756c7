"""What holds for every test of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import runs


@pytest.fixture(autouse=True)
def captures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pipelines on threads share captures and traces, unless a test is marked `own_captures`."""
    if request.node.get_closest_marker("own_captures"):
        yield
        return
    with runs.shared_captures():
        yield
