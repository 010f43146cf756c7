"""Models whose forward changes what outlives it: counters, buffers, averages, settings."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import CLASSES, WIDTH, Between, Block, Case, Scores, Stack


class Counts(Stack):
    def prepare(self) -> None:
        self.steps = 0

    def run(self, h: Tensor) -> Tensor:
        self.steps += 1
        return super().run(h) * self.steps


class Remembers(Stack):
    def prepare(self) -> None:
        self.seen: list[int] = []

    def run(self, h: Tensor) -> Tensor:
        self.seen.append(1)
        return super().run(h) * len(self.seen)


class DrawsItself(Stack):
    def prepare(self) -> None:
        self.generator = random.Random(0)

    def run(self, h: Tensor) -> Tensor:
        return super().run(h) * self.generator.random()


class CountsForTheRecord(Stack):
    """Nothing reads the counter, and scratch is made anew: neither matters."""

    def prepare(self) -> None:
        self.steps, self.last = 0, []

    def run(self, h: Tensor) -> Tensor:
        self.steps += 1
        self.last = []
        self.last.append(h.mean())
        return super().run(h) + self.last[0]


class CountsInside(Stack):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def forward(self, h: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(h) * self.steps


class ScaleOnTheClass(Stack):
    """A default on the class, and the first call puts a value of its own in front of it."""

    scale: float | None = None

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        if self.scale is None:
            self.scale = 2.0
            return h
        return h * self.scale


class ReadyOnTheClass(Stack):
    class block(Block):
        ready = False

        def forward(self, h: Tensor) -> Tensor:
            h = super().forward(h)
            if not self.ready:
                self.ready, h = True, h * 3
            return h


class CountsOnTheClass(Stack):
    steps = 0

    def run(self, h: Tensor) -> Tensor:
        type(self).steps += 1
        return super().run(h) * type(self).steps


class CountsForAllBlocks(Stack):
    class block(Block):
        calls = [0]

        def forward(self, h: Tensor) -> Tensor:
            self.calls[0] += 1
            return super().forward(h) * self.calls[0]


class Deletes(Stack):
    def prepare(self) -> None:
        self.first = True

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        if hasattr(self, "first"):
            del self.first
            return h * 3
        return h


class LooksAtItsDictionary(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        if "first" not in vars(self):
            self.first = True
            return h * 3
        return h


class Slotted:
    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


class CountsInASlot(Stack):
    def prepare(self) -> None:
        self.held = Slotted()

    def run(self, h: Tensor) -> Tensor:
        self.held.steps += 1
        return super().run(h) * self.held.steps


class KeepsWhatItMade(Stack):
    """All calls are alike."""

    scale: float | None = None

    def run(self, h: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 2.0
        return super().run(h) * self.scale


class SetsItUp(Between):
    """The first call settles something in an object of settings, as classifiers of transformers do."""

    def prepare(self) -> None:
        self.settings = SimpleNamespace(kind=None)

    def run(self, h: Tensor) -> Tensor:
        if self.settings.kind is None:
            self.settings.kind = "twice"
        h = super().run(h)
        return h * 2 if self.settings.kind == "twice" else h


class Averages(Stack):
    """A teacher follows a student."""

    def prepare(self) -> None:
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def run(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mean, param in zip(self.teacher.parameters(), self.inlet.parameters(), strict=True):
                    mean.mul_(0.9).add_(param * 0.1)
        h = super().run(h)
        return self.inlet(h) + self.teacher(h)


class AveragesData(Averages):
    def run(self, h: Tensor) -> Tensor:
        for mean, param in zip(self.teacher.parameters(), self.inlet.parameters(), strict=True):
            mean.data.mul_(0.9).add_(param.data * 0.1)
        return self.inlet(h) + self.teacher(h)


class AveragesAnew(Averages):
    def run(self, h: Tensor) -> Tensor:
        for mean, param in zip(self.teacher.parameters(), self.inlet.parameters(), strict=True):
            mean.data = mean.data * 0.9 + param.data * 0.1
        return self.inlet(h) + self.teacher(h)


class TeacherOfNorms(Stack):
    """As BYOL has it: the teacher sees other rows first, and its parts lie on any stage."""

    class block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())

    def prepare(self) -> None:
        self.teachers = deepcopy(self.blocks).requires_grad_(False)

    def run(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.teachers.parameters(), self.blocks.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        target = h.flip(0)
        for teacher in self.teachers:
            target = teacher(target)
        return super().run(h) + target.detach()


class SmallEmbeddings(Stack):
    def prepare(self) -> None:
        self.words = nn.Embedding(CLASSES, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(x + self.words(y), y)


class Shrinks(Stack):
    class block(Block):
        def forward(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                self.norm.weight.mul_(0.9)
            return super().forward(h)


class ReplacesData(Stack):
    class block(Block):
        def forward(self, h: Tensor) -> Tensor:
            self.norm.weight.data = self.norm.weight.data * 0.9
            return super().forward(h)


class MeanInPlace(Stack):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def update(self, new: Tensor) -> None:
        self.mean += new

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        if self.training:
            self.update(h.detach().mean(0))
        return h + self.mean


class MeansInData(MeanInPlace):
    """Buffers change by way of `.data` and of a view, in a module and between modules."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.data.mul_(0.9).add_(x.detach().mean(0))
            return super().forward(x + self.mean)

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        if self.training:
            with torch.no_grad():
                self.mean[:].mul_(0.9).add_(h.mean(0))
                self.mean.data.add_(0.1)
        return self.blocks[2](self.blocks[1](h) + self.mean)


class SetsItsData(MeanInPlace):
    def update(self, new: Tensor) -> None:
        self.mean.data = 0.5 * self.mean + new


class MeanAnew(MeanInPlace):
    def update(self, new: Tensor) -> None:
        self.mean = 0.5 * self.mean + new


class MeanInAnAttribute(MeanAnew):
    def prepare(self) -> None:
        self.mean = torch.zeros(WIDTH)


class RegistersAnew(MeanInPlace):
    def update(self, new: Tensor) -> None:
        self.register_buffer("mean", 0.5 * self.mean + new)


class MeanFromNone(MeanAnew):
    def prepare(self) -> None:
        self.mean = None

    def run(self, h: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros_like(h[0])
        return super().run(h)


class MeanFromNoBuffer(MeanFromNone):
    def prepare(self) -> None:
        self.register_buffer("mean", None)


class AddsUpInAnAttribute(Stack):
    """A loss that is new in each forward."""

    def run(self, h: Tensor) -> Tensor:
        self.total = h.new_zeros(())
        for block in self.blocks:
            h = block(h)
            self.total = self.total + h.square().mean()
        return h * self.total


class MeanInAList(Stack):
    def prepare(self) -> None:
        self.past = [torch.zeros(WIDTH)]

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h) + self.past[0]
        if self.training:
            self.past[0] = h.detach().mean(0)
        return h


class NormTwice(nn.Module):
    """One BatchNorm used before and after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.second(self.norm(self.first(self.norm(x)))).square().mean()


class Copies(Stack):
    """Buffers that both take over one value, and are read by nothing."""

    def prepare(self) -> None:
        for name in "ab":
            self.register_buffer(name, torch.zeros(2, WIDTH))

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        self.a.copy_(h.detach())
        self.b.copy_(h.detach())
        return h


class InstanceNorm(Stack):
    def prepare(self) -> None:
        self.norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)

    def run(self, h: Tensor) -> Tensor:
        return super().run(self.norm(h.view(-1, 2, 4)).flatten(1))


class WeightInPlace(Stack):
    """As weight normalisation by hand does."""

    def prepare(self) -> None:
        self.direction = nn.Parameter(torch.randn(CLASSES, WIDTH))
        del self.head.weight

    def run(self, h: Tensor) -> Tensor:
        self.head.weight = F.normalize(self.direction, dim=-1)
        return super().run(h)


class RegistersABuffer(Stack):
    """A cache, as of ALiBi in x_transformers."""

    def prepare(self) -> None:
        self.register_buffer("bias", None, persistent=False)

    def run(self, h: Tensor) -> Tensor:
        if self.bias is None:
            self.register_buffer("bias", torch.arange(WIDTH), persistent=False)
        return super().run(h) + self.bias


@torch.library.custom_op("odd::count", mutates_args=("seen",))
def count(seen: Tensor, h: Tensor) -> None:
    seen.add_((h > 0).sum(0))


class CountsByAnOperator(Stack):
    """An operator of its own, which changes what it is given."""

    def prepare(self) -> None:
        self.register_buffer("seen", torch.zeros(WIDTH))

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        if self.training:
            count(self.seen, h.detach())
        return h


FROZEN = "counters in attributes were frozen by tracing, without a word"
ON_INSTANCES = "only values on instances were watched, and what the first call set was taken as settled"
DIFFER = "averaged parameters differed between ranks, without a word"
EARLIER = "the backward of an earlier micro-batch saw changed parameters"
STEP, REPLACED = "Job.optimizer", "refused: in the place of the parameter"


MEAN = torch.zeros(CLASSES)


def far_from_the_mean(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        MEAN.mul_(0.9).add_(scores.mean(0), alpha=0.1)
    return (scores - MEAN).square().mean()


CASES = [
    *(
        Case(
            model,
            was,
            expect=rf"refused: \({'block' if model is CountsForAllBlocks else model.__name__}\) "
            rf"changes its attribute {attribute} \(",
            hint="register_buffer",
            slow=model in (Remembers, DrawsItself, CountsOnTheClass, LooksAtItsDictionary),
        )
        for was, model, attribute in (
            (FROZEN, Counts, "steps"),
            (FROZEN, Remembers, "seen"),
            (FROZEN, DrawsItself, "generator"),
            (ON_INSTANCES, ScaleOnTheClass, "scale"),
            (ON_INSTANCES, CountsOnTheClass, "steps"),
            (ON_INSTANCES, CountsForAllBlocks, "calls"),
            (ON_INSTANCES, Deletes, "first"),
            (ON_INSTANCES, LooksAtItsDictionary, "first"),
            (ON_INSTANCES, CountsInASlot, "held"),
        )
    ),
    Case(ReadyOnTheClass, "a flag on the class was taken as settled", between="attribute ready"),
    Case(KeepsWhatItMade, "what the first call settles is no obstacle"),
    Case(CountsForTheRecord, "a counter that nothing reads is no obstacle", slow=True),
    Case(CountsInside, "counters were frozen by tracing", between="attribute steps"),
    Case(SetsItUp, "what the first call settles is no obstacle", between="data"),
    Case(Averages, "a teacher that the forward averages was another one on each rank"),
    Case(TeacherOfNorms, "it trained, and could not be evaluated", cuts=(3, 2, 6)),
    Case(SmallEmbeddings, "the forward normalises rows", between="changes its parameter"),
    Case(AveragesData, DIFFER, expect="refused: changes the parameter teacher.*between modules", hint=STEP),
    Case(AveragesAnew, DIFFER, expect=f"{REPLACED} teacher.weight", hint=STEP, slow=True),
    Case(Shrinks, EARLIER, expect="refused: blocks.0.norm.weight .*while the backward", hint=STEP),
    Case(ReplacesData, EARLIER, expect=f"{REPLACED} blocks.0.norm", hint=STEP),
    Case(MeanInPlace, "a running mean that is changed in place, as the refusal of a counter says to do"),
    Case(MeansInData, "changes that no version counter shows were lost", between="fake tensor", cuts=(3, 2)),
    Case(SetsItsData, "export forgets the data of a buffer", between="sets the data", cuts=(2, 1)),
    *(
        Case(model, f"export forgets new tensors for {what}", between="a new tensor as mean", cuts=(2, 1))
        for model, what in (
            (MeanAnew, "buffers"),
            (MeanInAnAttribute, "attributes"),
            (RegistersAnew, "what is registered again"),
            (MeanFromNone, "what is None at first"),
            (MeanFromNoBuffer, "what is None at first"),
        )
    ),
    Case(AddsUpInAnAttribute, "a new attribute was taken for one that is there"),
    Case(MeanInAList, "tensors kept in a plain list", between=".", slow=True),
    Case(NormTwice, "a BatchNorm used twice in one stage", cuts=(2, 1), slow=True),
    Case(Copies, "of two buffers set from one value one was not updated, and one was stale", cuts=(2, 1)),
    Case(InstanceNorm, "a call that changes buffers, though its schema denies it", cuts=(1, 2)),
    Case(WeightInPlace, "what tracing had left behind was taken for the model's own", cuts=(2, 3)),
    Case(CountsByAnOperator, "ended in an IndexError", between="auto_functionalized", cuts=(2, 3)),
    Case(RegistersABuffer, "buffers that the forward registers ended in a KeyError", cuts=(2, 3)),
    Case(
        Scores,
        "a loss that keeps a mean of its own trained with wrong numbers",
        expect="refused: the loss .*changes a tensor that it keeps",
        hint="buffer of the model",
        loss=far_from_the_mean,
    ),
]
