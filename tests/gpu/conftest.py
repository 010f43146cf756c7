"""Everything in this folder needs an accelerator: it is marked `gpu`, and skipped where there is none."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _needs_an_accelerator() -> None:
    torch = pytest.importorskip("torch")
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator on this machine")
