"""A reentrant checkpoint around several modules lost the gradients of all of them, and one around running
statistics a part of their updates, without a word."""

import odd_models
import pytest
from odd_code import Stack
from odd_models import Block, job
from runs import assert_same, even_plan, pipelined, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.ir.errors import CaptureError
from pipeloom.tracer.capture import capture


class Around(Stack):
    """What is checkpointed is cut: an nn.Sequential, and a function that calls two modules."""

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(Block(), nn.Linear(odd_models.WIDTH, odd_models.WIDTH))

    def run(self, h: Tensor) -> Tensor:
        h = checkpoint(self.blocks[0], h, use_reentrant=True)
        return checkpoint(lambda h: self.blocks[2](self.blocks[1](h)), h, use_reentrant=True)


class AroundInputs(Around):
    """The checkpoint's inputs need no gradient, so PyTorch gives none to what is inside."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(checkpoint(self.blocks[0], x, use_reentrant=True), y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("model", [Around, AroundInputs])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_flow_through_what_is_cut(model: type[nn.Module], stages: int) -> None:
    made = job(model)
    batches = [made.batch(seed, 8) for seed in range(2)]
    found = pipelined(made, even_plan(made, stages, microbatches=4), batches, evaluate=batches[:1])
    assert_same(found, plain(made, batches, 4, evaluate=batches[:1]), tolerance=2e-5)


class Normalises(Stack):
    """PyTorch runs what is checkpointed twice, and so moves its running statistics twice: ours moved once."""

    reentrant = False

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(odd_models.WIDTH, odd_models.WIDTH), nn.BatchNorm1d(odd_models.WIDTH))

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return h


class NormalisesOldWay(Normalises):
    reentrant = True


class NormalisesInside(Normalises):
    class block(nn.Module):  # type: ignore[assignment]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Normalises.block()

        def forward(self, h: Tensor) -> Tensor:
            return checkpoint(self.inner, h, use_reentrant=True)

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


@pytest.mark.parametrize("model", [Normalises, NormalisesOldWay, NormalisesInside])
def test_running_statistics_inside_a_checkpoint_are_refused(model: type[nn.Module]) -> None:
    refused = (
        rf"the forward of {model.__name__} updates running statistics inside a checkpoint \(.*\.py:\d+\)"
    )
    with pytest.raises(CaptureError, match=refused) as caught:
        capture(job(model), 2)
    assert "--treatments recompute" in str(caught.value.hint)
