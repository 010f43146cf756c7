"""Hooks on modules, where a cut goes. Those of the zoo are in `tests/support/odd/gradients.py`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from odd.case import Stack, job
from odd.gradients import FullBackwardHook, tripled
from torch import nn

from pipeloom.ir.errors import CutError
from pipeloom.tracer.capture import capture


def test_a_cut_through_a_module_with_a_hook_is_refused() -> None:
    lists = [["inlet", "blocks.0", "blocks.1.norm"], ["blocks.1.net", "blocks.2", "head"]]
    with pytest.raises(CutError, match="cuts blocks.1, which has a hook by register_full_backward_hook"):
        capture(replace(job(FullBackwardHook), modules=lists), 2)


@pytest.fixture
def hook_on_all_modules() -> Iterator[None]:
    def scaled(module: nn.Module, inner: Any, outer: Any) -> Any:
        return tripled(inner)

    handle = nn.modules.module.register_module_full_backward_hook(scaled)
    yield
    handle.remove()


def test_a_hook_for_all_modules_leaves_the_model_whole(hook_on_all_modules: None) -> None:
    captured = capture(job(Stack), 2)
    assert [op.name for op in captured.graph.ops] == ["model"]
    assert "register_module_full_backward_hook" in captured.graph.fallback
