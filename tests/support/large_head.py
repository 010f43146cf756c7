"""A model whose head is nearly all of its work."""

import torch
from torch import Tensor, nn

from pipeloom import Job

WIDTH, WORDS, LENGTH = 512, 50_000, 128


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.middle(self.embed(x))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    words = torch.randint(WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"x": words[:, :-1].contiguous(), "y": words[:, 1:].contiguous()}


def job() -> Job:
    return Job(model=Net, batch=batch, name="words")
