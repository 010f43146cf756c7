"""The zoo of `bench/trust.py`, as far as it needs no library but PyTorch: no model is silently wrong."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import trust
from trust_zoo.odd_modules import MODELS


def seen(model: str, stages: int) -> str:
    found = trust.try_model("plain modules", model, stages)
    assert found.verdict in ("equal", "refused"), f"{found.verdict}: {found.says}"
    return found.verdict


@pytest.mark.parametrize("model", ["decision on data", "gradient penalty"])
def test_a_model_is_equal_or_refused(model: str) -> None:
    assert seen(model, 2) == ("refused" if model == "gradient penalty" else "equal")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_plain_module(model: str) -> None:
    seen(model, 3)


def test_other_numbers_are_found() -> None:
    """The bench is told apart from one that always says "equal"."""

    def wrong(*args: object, **how: object) -> trust.Numbers:
        numbers = trust_pipelined(*args, **how)
        gradients = {name: grad * (1 + 1e-6) for name, grad in numbers.gradients.items()}
        return replace(numbers, gradients=gradients)

    trust_pipelined = trust.pipelined
    with patch.object(trust, "pipelined", wrong):
        found = trust.try_model("plain modules", "NumPy", 2)
    assert found.verdict == "wrong" and found.says.startswith("gradients differ by 1e-06")


def test_a_library_that_is_not_here_is_named() -> None:
    with patch.dict(trust.LIBRARIES, {"nothing": "no_such_models"}):
        (found,) = trust.listed(["nothing"], [])
    assert isinstance(found, trust.Verdict) and found.verdict == "not here"
    assert "no_such_models" in found.says
