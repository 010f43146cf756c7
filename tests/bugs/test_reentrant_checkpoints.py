"""A reentrant checkpoint around several modules lost the gradients of all of them, without a word."""

import odd_models
import pytest
from odd_code import Stack
from odd_models import Block, job
from runs import assert_same, even_plan, pipelined, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("model", [Around, AroundInputs])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_flow_through_what_is_cut(model: type[nn.Module], stages: int) -> None:
    made = job(model)
    batches = [made.batch(seed, 8) for seed in range(2)]
    found = pipelined(made, even_plan(made, stages, microbatches=4), batches, evaluate=batches[:1])
    assert_same(found, plain(made, batches, 4, evaluate=batches[:1]), tolerance=2e-5)
