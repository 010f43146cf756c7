"""Models of other libraries, tiny and with random weights: what `bench/trust.py` trains. A file per library
has `MODELS`, name -> a function that makes the job."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job

Batch = dict[str, Tensor]


def import_torchvision() -> None:
    """Import torchvision, which other libraries import too, also where its compiled operators were built for
    another PyTorch and do not load: importing it takes for granted that some of them are declared. Models
    that call them (those of detection) cannot run then."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # what is declared goes with it
        importlib.import_module("torchvision")


_KEPT: list[torch.library.Library] = []

WORDS = 48
CLASSES = 4


def tokens(length: int = 8, **more: int) -> Callable[[int, int], Batch]:
    """Batches of token ids with labels. more: further inputs of ones, by name and length."""

    def batch(seed: int, rows: int) -> Batch:
        made = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, WORDS, (rows, length), generator=made)
        extra = {name: torch.ones(rows, size, dtype=torch.long) for name, size in more.items()}
        return {"input_ids": ids, "labels": ids.clone()} | extra

    return batch


def images(
    size: int = 32, channels: int = 3, *, name: str = "x", label: str = "y"
) -> Callable[[int, int], Batch]:
    """Batches of images with a class each."""

    def batch(seed: int, rows: int) -> Batch:
        made = torch.Generator().manual_seed(seed)
        pixels = torch.randn(rows, channels, size, size, generator=made)
        return {name: pixels, label: torch.randint(0, CLASSES, (rows,), generator=made)}

    return batch


def normal(**shapes: tuple[int, ...]) -> Callable[[int, int], Batch]:
    """Batches of normal numbers, by name and the shape of a row."""

    def batch(seed: int, rows: int) -> Batch:
        made = torch.Generator().manual_seed(seed)
        return {name: torch.randn(rows, *shape, generator=made) for name, shape in shapes.items()}

    return batch


class Classifier(nn.Module):
    """A model of images, called as `forward(x, y)`; the loss is the job's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.net(x)


def cross_entropy(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return fn.cross_entropy(outputs.flatten(1), batch["y"])


def square(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean square of what a model returns first."""
    while not isinstance(outputs, Tensor):
        outputs = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs[0]
    return outputs.square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def job(model: Callable[[], nn.Module], batch: Callable[[int, int], Batch], *, name: str, **more: Any) -> Job:
    return Job(model=model, batch=batch, optimizer=sgd, name=name, **more)
