"""Every script of bench/ can be imported, and what it names of a module is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import gpu_check
import pytest
import torch
import trust
from gpu_check import Finding

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


# bench/gpu_check.py where there is no accelerator. That it runs on one, tests/standin shows.


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has what the sentence says is missing"
)
def test_without_a_device_a_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 1
    assert capsys.readouterr().err.startswith("gpu_check: this Python's torch sees no accelerator")


def test_what_differs_is_told_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def numbers(setup: gpu_check.Setup) -> list[Finding]:
        return [Finding("losses", 0.5, "at most 0.1", "look at the casts"), Finding("waits", 1, "1")]

    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "numbers"])
    monkeypatch.setattr(gpu_check, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_check, "named_device", lambda name: "cuda")
    monkeypatch.setattr(gpu_check, "described", lambda device: {"date": "2026-01-01"})
    monkeypatch.setitem(gpu_check.PHASES, "numbers", numbers)
    assert gpu_check.main() == 1
    assert "losses is 0.5, expected at most 0.1: look at the casts" in capsys.readouterr().out
    written = json.loads((tmp_path / "results" / "gpu_check_cuda_2026-01-01.json").read_text())
    assert [finding["what"] for finding in written["findings"]] == ["losses", "waits"]


# What bench/trust.py says of a model.


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
