"""Jobs of a user's own file: `commands.prepare` copies it to where commands run, as `mine.py`."""

from itertools import count

import torch
from torch import nn

from pipeloom import Job

CALLS = count(1)


class Net(nn.Module):
    """Linear layers of these widths, and a head of another shape if there is one."""

    def __init__(self, *widths: int, head: int = 0) -> None:
        super().__init__()
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.head = nn.Linear(widths[-1], head) if head else nn.Identity()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x).square().mean()


class Deeper(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layers[0](x))


class Counting(Net):
    """Each call has another factor, which no capture can know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * next(CALLS)


class Classifier(Net):
    """Its head is dearer than all the rest: stages cannot be equal."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.logits(x), target)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(seed: int, size: int, width: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, width, generator=torch.Generator().manual_seed(seed))}


def batch_with_targets(seed: int, size: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {**batch(seed, size), "target": torch.randint(64, (size,), generator=drawn)}


def batch_of_words(seed: int, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(8, (size, 5), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


class Repeated(nn.Module):
    """A front, four equal blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def job() -> Job:
    """11 ops."""
    return Job(name="tiny", model=lambda: Net(*[8] * 5), batch=batch)


other = Job(name="other", model=lambda: Deeper(*[8] * 5), batch=batch)
counting = Job(name="counting", model=lambda: Counting(*[8] * 5), batch=batch)
wide = Job(name="tiny", model=lambda: Net(*[512] * 5), batch=lambda seed, size: batch(seed, size, 512))
odd = Job(name="odd", model=lambda: Classifier(8, *[16] * 7, head=64), batch=batch_with_targets)
blocks = Job(name="tiny", model=Repeated, batch=batch, loss=lambda output, batch: output)
without_blocks = Job(name="tiny", model=lambda: Net(8, head=8), batch=batch)
words = Job(name="words", model=Words, batch=batch_of_words)
