"""How many examples Hypothesis draws."""

from typing import Any

from hypothesis import settings


def examples(quick: int, many: int, **how: Any) -> settings:
    """So many in `make test`, whose examples are the same each time, and in `make test-all`."""
    return settings(max_examples=quick if settings.default.derandomize else many, **how)
