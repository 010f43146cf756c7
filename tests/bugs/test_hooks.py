"""Hooks were dropped without a word, or run twice at each boundary, or failed with an error of torch.

Each kind either gives the numbers of plain PyTorch or is refused by name, with its line and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plain_net import PlainNet, distance, job_of
from torch import Tensor, nn

from pipeloom.ir.errors import CaptureError, CutError
from pipeloom.tracer.capture import capture

TOLERANCE = 2e-6


def tripled(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else grad * 3 for grad in grads)


class OnParameter(PlainNet):
    def prepare(self) -> None:
        self.b[0].weight.register_hook(lambda grad: grad * 3)


class AfterAccumulating(PlainNet):
    def prepare(self) -> None:
        def tripled_in_place(param: Tensor) -> None:
            assert param.grad is not None
            param.grad.mul_(3)

        self.b[0].weight.register_post_accumulate_grad_hook(tripled_in_place)


def handed_over() -> nn.Module:
    """The hook is put on a finished model."""
    model = PlainNet()
    model.c.weight.register_hook(lambda grad: grad * 3)
    return model


def made_elsewhere() -> nn.Module:
    """A constructor that cannot run on fake tensors."""
    model = PlainNet()
    if float(model.c.weight.sum()) < 1e9:
        model.c.weight.register_hook(lambda grad: grad * 3)
    return model


@pytest.mark.parametrize(
    ("model", "parameter", "function"),
    [
        (OnParameter, "b.0.weight", "register_hook"),
        (AfterAccumulating, "b.0.weight", "register_post_accumulate_grad_hook"),
        (handed_over, "c.weight", "register_hook"),
        (made_elsewhere, "c.weight", "register_hook"),
    ],
)
def test_hooks_on_parameters_are_refused(
    model: Callable[[], nn.Module], parameter: str, function: str
) -> None:
    with pytest.raises(CaptureError, match=rf"{parameter}, by {function} \(.*test_hooks\.py:\d+\)") as raised:
        capture(job_of(model), 2)
    assert "torch.autograd.Function" in str(raised.value.hint)


class Forward(PlainNet):
    def prepare(self) -> None:
        self.b.register_forward_hook(lambda module, args, result: result * 2)
        self.b[0].register_forward_hook(lambda module, args, result: result + 1)
        self.c.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


class FullBackward(PlainNet):
    def prepare(self) -> None:
        self.b.register_full_backward_hook(lambda module, inner, outer: tripled(inner))


class FullBackwardInside(PlainNet):
    def prepare(self) -> None:
        self.b[0].register_full_backward_hook(lambda module, inner, outer: tripled(inner))


class FullBackwardPre(PlainNet):
    def prepare(self) -> None:
        self.b.register_full_backward_pre_hook(lambda module, outer: tripled(outer))


class OldBackward(PlainNet):
    def prepare(self) -> None:
        self.b[0].register_backward_hook(lambda module, inner, outer: tripled(inner))


class HookedTensorInside(PlainNet):
    class inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, h: Tensor) -> Tensor:
            h = self.layer(h)
            if h.requires_grad:
                h.register_hook(lambda grad: grad * 3)
            return h

    def prepare(self) -> None:
        self.b = self.inner()


class Packed(PlainNet):
    def run(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return super().run(h)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    "model",
    [
        Forward,
        FullBackward,
        FullBackwardInside,
        FullBackwardPre,
        OldBackward,
        HookedTensorInside,
        Packed,
    ],
    ids=lambda model: model.__name__,
)
def test_hooks_that_run_as_in_plain_pytorch(model: type[nn.Module], split: bool) -> None:
    assert distance(model, split=split) < TOLERANCE


class OnTensor(PlainNet):
    def run(self, h: Tensor) -> Tensor:
        h = self.a(h)
        h.register_hook(lambda grad: grad * 0.5)
        return self.c(self.b(h))


class OnNode(PlainNet):
    def run(self, h: Tensor) -> Tensor:
        h = self.a(h)
        if h.grad_fn is not None:
            h.grad_fn.register_hook(lambda inner, outer: tripled(inner))
        return self.c(self.b(h))


class OnSeveral(PlainNet):
    def run(self, h: Tensor) -> Tensor:
        h = self.a(h)
        torch.autograd.graph.register_multi_grad_hook((h,), lambda grads: None)
        return self.c(self.b(h))


@pytest.mark.parametrize(
    ("model", "what"), [(OnTensor, "register_hook"), (OnNode, "grad_fn"), (OnSeveral, "grad_fn")]
)
def test_hooks_between_modules_are_refused(model: type[nn.Module], what: str) -> None:
    refused = rf"calls {what} on a tensor between modules \(.*test_hooks\.py:\d+\)"
    with pytest.raises(CaptureError, match=refused) as raised:
        capture(job_of(model), 2)
    assert "into the forward of a module" in str(raised.value.hint)


def test_a_cut_through_a_module_with_a_hook_is_refused() -> None:
    job = job_of(FullBackward)
    listed = type(job)(**{**vars(job), "modules": [["a", "b.0"], ["b.1", "c", "head"]]})
    with pytest.raises(CutError, match="Job.modules cuts b, which has a hook by register_full_backward_hook"):
        capture(listed, 2)


@pytest.fixture
def hook_on_all_modules() -> Iterator[None]:
    def scaled(module: nn.Module, inner: Any, outer: Any) -> Any:
        return tripled(inner)

    handle = nn.modules.module.register_module_full_backward_hook(scaled)
    yield
    handle.remove()


def test_a_hook_for_all_modules_leaves_the_model_whole(hook_on_all_modules: None) -> None:
    captured = capture(job_of(PlainNet), 2)
    assert [op.name for op in captured.graph.ops] == ["model"]
    assert "register_module_full_backward_hook" in captured.graph.fallback
