"""What a forward changes besides its buffers: counters were frozen by tracing, averaged parameters differed
between ranks, without a word.

Each either gives the numbers of plain PyTorch or is refused by name, with its line and what to do.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from plain_net import PlainNet, distance, job_of
from torch import Tensor, nn

from pipeloom.ir.errors import CaptureError
from pipeloom.tracer.attributes import attributes_kept
from pipeloom.tracer.capture import capture

TOLERANCE = 2e-6


class Counts(PlainNet):
    def prepare(self) -> None:
        self.steps = 0

    def run(self, h: Tensor) -> Tensor:
        self.steps += 1
        return super().run(h) * self.steps


class CountsToAThreshold(Counts):
    """The first calls give the same graph."""

    def run(self, h: Tensor) -> Tensor:
        self.steps += 1
        return PlainNet.run(self, h) * (2 if self.steps > 1000 else 1)


class Remembers(PlainNet):
    def prepare(self) -> None:
        self.seen: list[int] = []

    def run(self, h: Tensor) -> Tensor:
        self.seen.append(1)
        return super().run(h) * len(self.seen)


class DrawsItself(PlainNet):
    def prepare(self) -> None:
        self.generator = random.Random(0)

    def run(self, h: Tensor) -> Tensor:
        return super().run(h) * self.generator.random()


@pytest.mark.parametrize(
    ("model", "attribute"),
    [(Counts, "steps"), (CountsToAThreshold, "steps"), (Remembers, "seen"), (DrawsItself, "generator")],
)
def test_what_the_models_own_forward_carries_is_refused(model: type[nn.Module], attribute: str) -> None:
    refused = (
        rf"the forward of the model \({model.__name__}\) changes its attribute {attribute} \(.*\.py:\d+\)"
    )
    with pytest.raises(CaptureError, match=refused) as raised:
        capture(job_of(model), 2)
    assert "register_buffer" in str(raised.value.hint)


class CountsInABuffer(PlainNet):
    """What the refusal says to do."""

    def prepare(self) -> None:
        self.register_buffer("steps", torch.zeros(()))

    def run(self, h: Tensor) -> Tensor:
        self.steps += 1
        return super().run(h) * self.steps


class CountsForTheRecord(PlainNet):
    """Nothing reads the counter, and scratch is made anew: neither matters."""

    def prepare(self) -> None:
        self.steps, self.last = 0, []

    def run(self, h: Tensor) -> Tensor:
        self.steps += 1
        self.last = []
        self.last.append(h.mean())
        return super().run(h) + self.last[0]


class CountsInside(PlainNet):
    class inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.steps = nn.Linear(6, 6), 0

        def forward(self, h: Tensor) -> Tensor:
            self.steps += 1
            return self.layer(h) * self.steps

    def prepare(self) -> None:
        self.b = self.inner()


class StartsOtherwise(PlainNet):
    class inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.ready = nn.Linear(6, 6), False

        def forward(self, h: Tensor) -> Tensor:
            h = self.layer(h)
            if not self.ready:
                self.ready, h = True, h * 3
            return h

    def prepare(self) -> None:
        self.b = self.inner()


class Averages(PlainNet):
    """A teacher follows a student."""

    def prepare(self) -> None:
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def run(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, param in zip(self.teacher.parameters(), self.c.parameters(), strict=True):
                mean.mul_(0.9).add_(param * 0.1)
        h = self.b(self.a(h))
        return self.c(h) + self.teacher(h)


class SmallEmbeddings(PlainNet):
    def prepare(self) -> None:
        self.words = nn.Embedding(3, 6, max_norm=0.5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(x + self.words(y), y)


@pytest.mark.parametrize(
    "model",
    [CountsInABuffer, CountsForTheRecord, CountsInside, StartsOtherwise, Averages, SmallEmbeddings],
    ids=lambda model: model.__name__,
)
def test_changes_that_run_as_in_plain_pytorch(model: type[nn.Module]) -> None:
    assert distance(model) < TOLERANCE


class AveragesData(Averages):
    def run(self, h: Tensor) -> Tensor:
        for mean, param in zip(self.teacher.parameters(), self.c.parameters(), strict=True):
            mean.data.mul_(0.9).add_(param.data * 0.1)
        return self.c(h) + self.teacher(h)


class AveragesAnew(Averages):
    def run(self, h: Tensor) -> Tensor:
        for mean, param in zip(self.teacher.parameters(), self.c.parameters(), strict=True):
            mean.data = mean.data * 0.9 + param.data * 0.1
        return self.c(h) + self.teacher(h)


class Shrinks(PlainNet):
    class inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.mul_(0.9)
            return self.layer(h)

    def prepare(self) -> None:
        self.b = self.inner()


class ShrinksData(Shrinks):
    class inner(Shrinks.inner):
        def forward(self, h: Tensor) -> Tensor:
            self.layer.weight.data.mul_(0.9)
            return self.layer(h)


class Replaces(Shrinks):
    class inner(Shrinks.inner):
        def forward(self, h: Tensor) -> Tensor:
            self.layer.weight.data = self.layer.weight.data * 0.9
            return self.layer(h)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (AveragesData, r"changes the parameter teacher.weight \(.*:\d+\), between modules"),
        (AveragesAnew, r"another tensor in the place of the parameter teacher.weight \(.*:\d+\)"),
        (Shrinks, r"changes the parameter b.layer.weight \(.*:\d+\), while the backward of an earlier"),
        (ShrinksData, r"changes the parameter b.layer.weight \(.*:\d+\), while the backward of an earlier"),
        (Replaces, r"another tensor in the place of the parameter b.layer.weight"),
    ],
)
def test_changed_parameters_are_refused(model: type[nn.Module], why: str) -> None:
    with pytest.raises(CaptureError, match=why) as raised:
        capture(job_of(model), 2)
    assert "Job.optimizer" in str(raised.value.hint)


def test_attributes_are_put_back() -> None:
    layer = nn.Linear(2, 2)
    held = {"items": [1, {2}], "drawn": random.Random(0), "layer": layer}
    layer.held, layer.name = held, "before"
    state = held["drawn"].getstate()
    with attributes_kept(layer):
        held["items"][1].add(3)
        held["items"].append(4)
        held["drawn"].random()
        held["more"] = layer.more = 5
        layer.name = "after"
    assert layer.held is held and held == {"items": [1, {2}], "drawn": held["drawn"], "layer": layer}
    assert held["drawn"].getstate() == state and layer.name == "before" and not hasattr(layer, "more")


class SetsItUp(PlainNet):
    """The first call settles something in an object of settings, as classifiers of transformers do."""

    def prepare(self) -> None:
        self.settings = SimpleNamespace(kind=None)

    def run(self, h: Tensor) -> Tensor:
        if self.settings.kind is None:
            self.settings.kind = "twice"
        h = super().run(h)
        return h * 2 if self.settings.kind == "twice" else h


class SetsItUpAndDecides(SetsItUp):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h) if h.sum() > -1e9 else h


@pytest.mark.parametrize("model", [SetsItUp, SetsItUpAndDecides])
def test_what_the_first_call_settles_is_no_obstacle(model: type[nn.Module]) -> None:
    assert distance(model) < TOLERANCE
