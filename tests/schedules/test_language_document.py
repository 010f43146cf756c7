"""The examples of docs/schedules.md give what stands there."""

from __future__ import annotations

import doctest
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_examples_of_the_document() -> None:
    failed, tried = doctest.testfile(
        str(DOCUMENT), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert not failed and tried > 30
