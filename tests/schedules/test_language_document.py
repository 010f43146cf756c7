"""The examples of the pages on schedules give what stands there."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "least"), [("schedules.md", 5), ("schedule-language.md", 30)])
def test_the_examples_of_a_page(page: str, least: int) -> None:
    failed, tried = doctest.testfile(
        str(DOCS / page), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert not failed and tried > least
