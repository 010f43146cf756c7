"""An embedding with sparse gradients was exported, and tracing its stage's backward ended in a traceback."""

from functools import partial

import torch
import zoo
from runs import assert_same, capture_of, even_plan, pipelined, plain
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(zoo.VOCABULARY, 8, sparse=True)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, zoo.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(self.tokens(input_ids)))
        return fn.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_they_train_as_in_one_process() -> None:
    job = Job(model=Sparse, batch=zoo.token_batch, optimizer=partial(torch.optim.SGD, lr=0.1))
    assert "has sparse gradients, in aten.embedding.default" in capture_of(job).graph.fallback
    batches = [job.batch(seed, 4) for seed in range(2)]
    found, expected = pipelined(job, even_plan(job, 2, microbatches=2), batches), plain(job, batches, 2)
    expected.gradients = {name: grad.to_dense() for name, grad in expected.gradients.items()}
    assert_same(found, expected, tolerance=1e-5)
