"""What is said where something is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeloom.ir.errors import PipeloomError


def refused(error: type[PipeloomError], call: Callable[..., object], *given: Any, **how: Any) -> str:
    """The message and the hint of an error of this class; there is a hint."""
    with pytest.raises(error) as caught:
        call(*given, **how)
    assert caught.value.hint, caught.value
    return str(caught.value)
