"""Values had the names of parameters, buffers or batch entries, and a stage that got both took one for the
other: other numbers, or an error about shapes."""

import pytest
import torch
import zoo
from runs import assert_same, capture_of, pipelined, plain, plan_for
from torch import Tensor, nn

from pipeloom import Job


class LikeParameters(nn.Module):
    """`mean` is a buffer, `mul` a parameter, and both are what ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.mul = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("mean", torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into((x - self.mean) * self.mul)
        middle = h.mean(0)
        return ((h - self.mean).sin() * middle * self.mul + middle).square().mean()


class LikeEntries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)

    def forward(self, sin: Tensor, linear: Tensor) -> Tensor:
        return ((self.into(sin).sin() + sin) * linear).cos().square().mean()


class Undecided(nn.Module):
    """Cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.into(x * 2 if float(x.detach().sum()) > 1e9 else x)


class Encoders(nn.Module):
    """Submodules called as what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.audio, self.both = Undecided(), Undecided(), Undecided()

    def forward(self, text: Tensor, audio: Tensor) -> Tensor:
        seen = self.text(text) * self.audio(audio)
        return (self.both(seen + text) + audio).square().mean()


class Twice(nn.Module):
    """A parameter called as a batch entry: such a model is cut between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.second((self.first(x * self.scale) * scale).sin()).square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (LikeParameters, "x"),
        (LikeEntries, "sin linear"),
        pytest.param(Encoders, "text audio", marks=pytest.mark.slow),
        pytest.param(Twice, "x scale", marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_of_one_process(model: type[nn.Module], keys: str) -> None:
    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {key: torch.randn(rows, 4, generator=generator) for key in keys.split()}

    job = Job(model=model, batch=batch, optimizer=zoo.sgd, name="names")
    captured = capture_of(job)
    batches = [batch(seed, 4) for seed in range(2)]
    expected = plain(job, batches, 2, evaluate=batches)
    names = [op.name for op in captured.graph.ops if not op.cheap]
    for place in range(1, len(names)):
        plan = plan_for(captured, {n: int(at >= place) for at, n in enumerate(names)}, microbatches=2)
        assert_same(pipelined(job, plan, batches, evaluate=batches), expected, tolerance=1e-5)
