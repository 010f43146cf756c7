"""Models that export changed silently, or could not be run after it."""

from collections.abc import Callable

import pytest
import torch
import zoo
from runs import assert_same, even, pipelined, plain, plan_for
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job
from pipeloom.ir.errors import CaptureError
from pipeloom.tracer.capture import capture
from pipeloom.tracer.export.torch_export import export_program


class TwoLayers(nn.Module):
    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], **extra: object) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return fn.mse_loss(self.b(self.between(self, self.a(x))), y)


def compare(model: Callable[[], nn.Module], *, cuts: tuple[int, ...] = (1, 2)) -> None:
    job = Job(model=model, batch=zoo.vector_batch, optimizer=zoo.sgd)
    batches = [job.batch(seed, 4) for seed in range(2)]
    expected = plain(job, batches, 2, evaluate=batches[:1])
    captured = capture(job, 2)
    assert not captured.graph.fallback
    for stages in cuts:
        plan = plan_for(captured, even(captured.graph, stages), microbatches=2, schedule="gpipe")
        assert_same(pipelined(job, plan, batches, evaluate=batches[:1]), expected, tolerance=1e-5)


def test_assignment_to_a_part_of_a_tensor() -> None:
    """It becomes `aten.copy`, which has no derivative."""

    def between(self: nn.Module, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 4:] = h[:, :4].exp()
        h[:, 0] = 1.0
        return h

    compare(lambda: TwoLayers(between))


@pytest.mark.slow
def test_tensors_that_are_plain_attributes() -> None:
    """They were fake at run time."""
    compare(
        lambda: TwoLayers(
            lambda self, h: h * self.scale + self.shift, scale=torch.full((8,), 0.5), shift=torch.randn(8)
        )
    )


def test_a_call_that_changes_buffers_though_its_schema_denies_it() -> None:
    compare(
        lambda: TwoLayers(
            lambda self, h: self.norm(h.view(-1, 2, 4)).flatten(1),
            norm=nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        ),
        cuts=(1,),
    )


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def hooked(self: nn.Module, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def penalised(self: nn.Module, h: Tensor) -> Tensor:
    return h + torch.autograd.grad(h.square().sum(), h, create_graph=True)[0]


def clamped(self: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.a.weight.clamp_(-0.01, 0.01)
    return h


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda self, h: Doubled.apply(h), "the gradient of Doubled"),
        (hooked, "a hook on a tensor"),
        (penalised, "autograd.grad"),
        (clamped, "changes its parameter a.weight"),
    ],
)
def test_gradients_of_the_users_own_are_not_lost(between: Callable[..., Tensor], reason: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = TwoLayers(between)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.model(**batch)

    with pytest.raises(CaptureError, match=reason):
        export_program(Wrapped(), zoo.vector_batch(0, 2), "mine")
    assert torch.autograd.grad is not None and Doubled.apply(torch.ones(1)).item() == 2.0


@pytest.mark.slow
def test_an_operator_with_a_registered_gradient_is_captured() -> None:
    """Mixtral's experts use one; it is no autograd function of the user's."""
    assert not capture(zoo.job("mixtral"), 2).graph.fallback


def uncast(self: nn.Module, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.b(h.float())


def uncast_and_stopped(self: nn.Module, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        factor = self.b(h.float())
    return h * factor


def asking(self: nn.Module, h: Tensor) -> Tensor:
    return h * 2 if torch.is_autocast_enabled("cpu") else h


@pytest.mark.sampled(2)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("between", [uncast, uncast_and_stopped, asking])
def test_autocast_switched_off_or_asked_for(
    between: Callable[..., Tensor], autocast: torch.dtype | None
) -> None:
    """Export knew nothing of the autocast around it, and forgets `no_grad` inside one."""
    job = Job(model=lambda: TwoLayers(between), batch=zoo.vector_batch, optimizer=zoo.sgd)
    batches = [job.batch(1, 4)]
    captured = capture(job, 2, autocast=autocast)
    plan = plan_for(captured, even(captured.graph, 1), microbatches=2)
    found = pipelined(job, plan, batches, autocast=autocast)
    assert_same(found, plain(job, batches, 2, autocast=autocast), tolerance=1e-6)


@pytest.mark.slow
def test_a_frozen_stage_under_autocast() -> None:
    """A stage without gradients ran without autocast."""
    job = zoo.job("frozen")
    batches = [job.batch(1, 4)]
    captured = capture(job, 2, autocast=torch.bfloat16)
    count = sum(not op.cheap for op in captured.graph.ops)
    plan = plan_for(captured, even(captured.graph, count), microbatches=2, schedule="gpipe")
    found = pipelined(job, plan, batches, autocast=torch.bfloat16)
    assert_same(found, plain(job, batches, 2, autocast=torch.bfloat16), tolerance=1e-6)


class Averages(nn.Module):
    """Its forward makes a constant that depends on the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.tensor(float(len(x)))
        return (self.a(x) - y).square().sum() / rows


@pytest.mark.slow
def test_constants_of_other_sizes() -> None:
    """The constant of the first size was used for all."""
    job = Job(model=Averages, batch=zoo.vector_batch, optimizer=zoo.sgd)
    batches = [job.batch(1, 5)]
    plan = plan_for(captured := capture(job, 2), even(captured.graph, 2), microbatches=3)
    found = pipelined(job, plan, batches, evaluate=batches)
    assert_same(found, plain(job, batches, 3, evaluate=batches), tolerance=1e-6)
