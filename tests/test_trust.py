"""What `bench/trust.py` says of a model. All models of its zoo that need no library but PyTorch are those of
`tests/transparency/test_odd_models.py`."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import trust


@pytest.fixture(autouse=True)
def other_tests_hear_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "quiet", lambda: None)


@pytest.mark.parametrize(("model", "verdict"), [("decides", "equal"), ("gradient penalty", "refused")])
def test_a_model_is_equal_or_refused(model: str, verdict: str) -> None:
    found = trust.try_model("plain modules", model, 2)
    assert found.verdict == verdict, found.says


def test_other_numbers_are_found() -> None:
    """The bench is told apart from one that always says "equal"."""

    def wrong(*args: object, **how: object) -> trust.Numbers:
        numbers = trust_pipelined(*args, **how)
        gradients = {name: grad * (1 + 1e-6) for name, grad in numbers.gradients.items()}
        return replace(numbers, gradients=gradients)

    trust_pipelined = trust.pipelined
    with patch.object(trust, "pipelined", wrong):
        found = trust.try_model("plain modules", "uses numpy", 2)
    assert found.verdict == "wrong" and found.says.startswith("gradients differ by 1e-06")
