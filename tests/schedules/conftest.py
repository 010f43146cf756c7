"""Operations that a test declares are forgotten after it."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pipeloom.ir.action import KINDS
from pipeloom.ir.operation import OPERATIONS


@pytest.fixture(autouse=True)
def forget_operations() -> Iterator[None]:
    tables: tuple[dict[Any, Any], ...] = (OPERATIONS, KINDS)
    before = [dict(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)
    sys.modules.pop("own_schedule", None)  # so that loading the example again declares its operation again
