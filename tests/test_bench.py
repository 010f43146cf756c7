"""Every script of bench/ can be imported, and what it names of a module is there."""

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

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


def test_there_are_scripts() -> None:
    assert {"graphpipe", "two_bw", "trust_zoo.timm_models"} <= set(NAMES) and set(LIBRARIES) <= set(NAMES)


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
