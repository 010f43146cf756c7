"""Every script of bench/ can be imported, and what it names of a module is there."""

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import trust

BENCH = Path(__file__).parents[1] / "bench"
NAMES = sorted(".".join(f.relative_to(BENCH).with_suffix("").parts) for f in BENCH.rglob("*.py"))
LIBRARIES = {
    "trust_zoo.diffusers_models": "diffusers",
    "trust_zoo.graph_models": "torch_geometric",
    "trust_zoo.peft_models": "peft",
    "trust_zoo.segmentation_models": "segmentation_models_pytorch",
    "trust_zoo.timm_models": "timm",
    "trust_zoo.torchvision_models": "torchvision",
    "trust_zoo.x_transformers_models": "x_transformers",
}
"""Modules whose library is in the extra `bench` only."""


@pytest.mark.parametrize("name", [name.removesuffix(".__init__") for name in NAMES])
def test_it_can_be_imported(name: str) -> None:
    library = LIBRARIES.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -e '.[bench]'")
    assert not list(missing(importlib.import_module(name)))


def missing(module: ModuleType) -> Iterator[str]:
    """What the code of a module names as `MODULE.NAME` and is not there."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = getattr(module, node.value.id, None)
            if isinstance(owner, ModuleType) and not hasattr(owner, node.attr):
                yield f"{node.value.id}.{node.attr}, line {node.lineno}"


# What bench/trust.py says of a model.


@pytest.fixture(autouse=True)
def other_tests_hear_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "quiet", lambda: None)


@pytest.mark.parametrize(("model", "verdict"), [("looks", "equal"), ("gradient penalty", "refused")])
def test_a_model_is_equal_or_refused(model: str, verdict: str) -> None:
    found = trust.try_model("odd models", model, 2)
    assert found.verdict == verdict, found.says


def test_other_numbers_are_found() -> None:
    """The bench is told apart from one that always says "equal"."""

    def wrong(*args: object, **how: object) -> trust.Numbers:
        numbers = trust_pipelined(*args, **how)
        gradients = {name: grad * (1 + 1e-6) for name, grad in numbers.gradients.items()}
        return replace(numbers, gradients=gradients)

    trust_pipelined = trust.pipelined
    with patch.object(trust, "pipelined", wrong):
        found = trust.try_model("odd models", "compares a number", 2)
    assert found.verdict == "wrong" and found.says.startswith("gradients differ by 1e-06")
