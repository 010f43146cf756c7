"""What torch.export is asked for, and what it must leave as it was."""

from collections.abc import Callable

import pytest
import torch
import zoo
from odd.case import Stack, job
from odd.gradients import CheckpointedInside, HookOnTensor, OwnGradient, Penalty, Signed
from odd.state import Shrinks
from runs import assert_same, capture_of, even, pipelined, plain, plan_for
from torch import Tensor, nn

from pipeloom.ir.errors import CaptureError
from pipeloom.tracer.capture import capture
from pipeloom.tracer.export import export_program


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (OwnGradient, "the gradient of Signed"),
        (HookOnTensor, "a hook on a tensor"),
        (Penalty, "autograd.grad"),
        (Shrinks, "changes its parameter"),
    ],
)
def test_gradients_of_the_users_own_are_not_lost(model: Callable[[], nn.Module], reason: str) -> None:
    """And what was watched for in autograd meanwhile is put back."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.model(**batch)["loss"]

    watched = torch.autograd.grad, Signed.apply
    with pytest.raises(CaptureError, match=reason):
        export_program(Wrapped(), job(model).batch(0, 2), "mine")
    assert (torch.autograd.grad, Signed.apply) == watched and Signed.apply(torch.ones(1)).item() == 2.0


def test_a_capture_that_fails_in_a_checkpoint_leaves_no_hooks() -> None:
    """The next backward of the process then ran the failed capture's forward again (seen with torch 2.11)."""
    assert capture(job(CheckpointedInside), 2).graph.fallback
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.slow
def test_an_operator_with_a_registered_gradient_is_captured() -> None:
    """Mixtral's experts use one; it is no autograd function of the user's."""
    assert not capture(zoo.job("mixtral"), 2).graph.fallback


class Uncast(Stack):
    def run(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inlet(h.float())


class UncastAndStopped(Stack):
    def run(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            factor = self.inlet(h.float())
        return h * factor


class AsksForAutocast(Stack):
    def run(self, h: Tensor) -> Tensor:
        return h * 2 if torch.is_autocast_enabled("cpu") else h


@pytest.mark.sampled(2)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("model", [Uncast, UncastAndStopped, AsksForAutocast])
def test_autocast_switched_off_or_asked_for(model: type[nn.Module], autocast: torch.dtype | None) -> None:
    """Export knew nothing of the autocast around it, and forgets `no_grad` inside one."""
    made = job(model)
    batches = [made.batch(1, 4)]
    captured = capture_of(made, 2, autocast=autocast)
    plan = plan_for(captured, even(captured.graph, 1), microbatches=2)
    found = pipelined(made, plan, batches, autocast=autocast)
    assert_same(found, plain(made, batches, 2, autocast=autocast), tolerance=1e-6)


@pytest.mark.slow
def test_a_frozen_stage_under_autocast() -> None:
    """A stage without gradients ran without autocast."""
    frozen = zoo.job("frozen")
    batches = [frozen.batch(1, 4)]
    captured = capture_of(frozen, 2, autocast=torch.bfloat16)
    count = sum(not op.cheap for op in captured.graph.ops)
    plan = plan_for(captured, even(captured.graph, count), microbatches=2, schedule="gpipe")
    found = pipelined(frozen, plan, batches, autocast=torch.bfloat16)
    assert_same(found, plain(frozen, batches, 2, autocast=torch.bfloat16), tolerance=1e-6)
