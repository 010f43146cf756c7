"""What a case of the zoo of odd models is, what its models are made of, and how its numbers are compared."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import nets
import torch
import torch.nn.functional as F
from batches import Batch, MakeBatch
from runs import Numbers, difference
from torch import Tensor, nn

from pipeloom import Job

WIDTH = 8
CLASSES = 5
WORDS = 11

ANYWHERE = ("anywhere",)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def vectors(seed: int, rows: int) -> Batch:
    """Rows of `x` are shifted up and down, two at a time, so that branches on sums go both ways."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    x = x + torch.where(torch.arange(rows) // 2 % 2 == 0, 1.5, -1.5)[:, None]
    return {"x": x, "y": torch.randint(0, CLASSES, (rows,), generator=generator)}


def words(seed: int, rows: int) -> Batch:
    ids = torch.randint(0, WORDS, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def labelled(*shape: int) -> MakeBatch:
    """Rows of this shape, and a class for each."""

    def batch(seed: int, rows: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, *shape, generator=generator)
        return {"x": x, "y": torch.randint(0, CLASSES, (rows,), generator=generator)}

    return batch


images, series = labelled(3, 6, 6), labelled(6, WIDTH)


class Block(nn.Module):
    """A residual block that normalises."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(self.norm(x))


class Deciding(Block):
    """Decides on data, so that torch.export refuses what it is part of."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 1.5
        return super().forward(x)


class Stack(nn.Module):
    """Three blocks and a head. Subclasses say what happens between them."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.prepare()

    def prepare(self) -> None:
        pass

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.run(self.inlet(x))), y)}


class Between(Stack):
    """Its blocks decide on data, so it is cut between its modules."""

    block = Deciding


class Scores(Stack):
    """Its loss is the job's."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.head(self.run(self.inlet(x)))


def job(model: Callable[[], nn.Module], batch: MakeBatch = vectors, **more: Any) -> Job:
    more = {"optimizer": sgd, "name": getattr(model, "__name__", "model")} | more
    return Job(model=model, batch=batch, **more)


@dataclass(frozen=True, eq=False)
class Case:
    """An odd model, and what must become of it.

    model: makes it.  was: what went wrong once, or what is odd.
    expect: "equal" to plain PyTorch; "random", if it draws numbers, as plain PyTorch draws others: equal to
        itself uncut, and to plain PyTorch in evaluation mode unless "random, in evaluation too"; or
        "refused: WORDS", a regular expression for the message, which has to name a line of the model, too.
    hint: words of the hint of a refusal.
    between: if it is cut between its modules, a regular expression for the reason; else it is one graph.
    cuts: where it is cut, the first one for the quick tests: into so many stages of about as many ops (one
        op at least), "anywhere": into two stages at each place in turn, or "around" each single op.
    slow: the first cut, or the refusal, is for the slow tests.  split: whether its backward can be split.
    evaluated: whether evaluation mode, too, can be cut there.
    """

    model: Callable[[], nn.Module]
    was: str
    _: KW_ONLY
    expect: str = "equal"
    hint: str = ""
    between: str = ""
    name: str = ""
    batch: MakeBatch = vectors
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None
    weight: Callable[[Mapping[str, Tensor]], Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    cuts: tuple[int | str, ...] = (3, 2)
    slow: bool = False
    split: bool = True
    evaluated: bool = True

    def __str__(self) -> str:
        return self.name or re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", self.title).lower()

    @property
    def title(self) -> str:
        """The name of what makes the model."""
        return (self.model.func if isinstance(self.model, partial) else self.model).__name__

    @cached_property
    def job(self) -> Job:
        """The same object each time, so that captures are shared."""
        given = {"loss": self.loss, "weight": self.weight, "optimizer": self.optimizer}
        return job(self.model, self.batch, name=self.title, **given)

    @cached_property
    def double(self) -> Job:
        return nets.in_double(self.job)

    @property
    def words(self) -> str:
        """What the message of its refusal says."""
        return self.expect.removeprefix("refused: ") if self.expect.startswith("refused: ") else ""

    def has_line(self, file: str, line: int) -> bool:
        """Whether a line is one of the code of its model, its loss or what made them."""
        made_by = self.model.func if isinstance(self.model, partial) else self.model
        code = made_by.__mro__ if isinstance(made_by, type) else [made_by]
        for part in [*code, self.loss]:
            if isinstance(part, FunctionType) or getattr(part, "__module__", "").startswith("odd"):
                known = sys.modules[part.__module__].__file__ or ""
                lines, first = inspect.getsourcelines(part)
                if known.endswith(file) and first <= line < first + len(lines):
                    return True
        return False


def differences(job: Job, found: Numbers, expected: Numbers) -> dict[str, float]:
    """The largest relative difference of each kind of number."""
    # Parameters that nothing trains and the forward changes are buffers to pipeloom. Buffers that the forward
    # registers are not.
    named = dict(job.model().named_buffers())
    wanted = expected.parameters | {n: t for n, t in expected.buffers.items() if n in named}
    state = {n: t for n, t in (found.parameters | found.buffers).items() if n in wanted}
    return {
        "losses": _apart(found.losses, expected.losses),
        "evaluation": _apart(found.evaluated, expected.evaluated),
        "gradients": difference(found.gradients, expected.gradients)[0],
        "parameters and buffers": difference(state, wanted)[0],
    }


def _apart(found: Sequence[float], expected: Sequence[float]) -> float:
    pairs = zip(found, expected, strict=True)
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)
