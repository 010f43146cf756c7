"""AmoebaNet-D, an image classifier whose cells are small graphs: cuts of it carry several values.

Source of the cells: Real et al. 2018, "Regularized Evolution for Image Classifier Architecture Search" (arXiv
1802.01548), figure 5, with the output states of the normal cell as in the authors' public implementation. The
numbers of parameters are those of table 1 of GPipe (Huang et al. 2018, arXiv 1811.06965) to 1 % for all sizes
whose figure there has three digits: 82, 318 and 542 million for 18 layers and 208, 416 and 544 filters.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job


class Step(NamedTuple):
    """One input of a pairwise sum: which state it reads, and the op that it passes it through."""

    state: int
    op: str


class Kind(NamedTuple):
    """A kind of cell. States 0 and 1 are the previous cell's and the one before; each further one is the sum
    of two steps. outputs: the states that are joined."""

    sums: tuple[tuple[Step, Step], ...]
    outputs: tuple[int, ...]


NORMAL = Kind(
    sums=(
        (Step(1, "conv_1x1"), Step(1, "max_3x3")),
        (Step(1, "identity"), Step(0, "conv_1x7_7x1")),
        (Step(0, "conv_1x1"), Step(0, "conv_1x7_7x1")),
        (Step(2, "max_3x3"), Step(2, "identity")),
        (Step(1, "avg_3x3"), Step(5, "conv_1x1")),
    ),
    outputs=(0, 3, 4, 6),
)
REDUCTION = Kind(
    sums=(
        (Step(0, "max_2x2"), Step(0, "max_3x3")),
        (Step(2, "identity"), Step(1, "conv_3x3")),
        (Step(2, "conv_1x7_7x1"), Step(2, "max_3x3")),
        (Step(3, "identity"), Step(1, "max_2x2")),
        (Step(2, "avg_3x3"), Step(3, "conv_1x1")),
    ),
    outputs=(4, 5, 6),
)


def conv(inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: int = 1) -> nn.Sequential:
    """ReLU, convolution, normalisation; keeps height and width at stride 1."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs)
    )


def through_quarter(channels: int, stride: int, *kernels: tuple[int, int]) -> nn.Sequential:
    """Convolutions on a quarter of the channels; the last of `kernels` has the stride along its length."""
    quarter = channels // 4
    steps = [conv(channels, quarter)]
    for kernel in kernels:
        steps.append(conv(quarter, quarter, kernel, stride))
        if len(kernels) > 1 and stride > 1:
            along = (stride, 1) if kernel[0] > 1 else (1, stride)
            steps[-1][1] = nn.Conv2d(
                quarter, quarter, kernel, along, (kernel[0] // 2, kernel[1] // 2), bias=False
            )
    return nn.Sequential(*steps, conv(quarter, channels))


class Halved(nn.Module):
    """Half the height and width by two convolutions, of which one looks at the pixels between the other's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = fn.relu(x_BCHW)
        shifted = fn.pad(x_BCHW, (0, 1, 0, 1))[:, :, 1:, 1:]
        joined: Tensor = self.norm(torch.cat([self.even(x_BCHW), self.odd(shifted)], dim=1))
        return joined


def identity(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Halved(channels, channels)


OPS: dict[str, Callable[[int, int], nn.Module]] = {
    "identity": identity,
    "max_2x2": lambda channels, stride: nn.MaxPool2d(2, stride=stride),
    "max_3x3": lambda channels, stride: nn.MaxPool2d(3, stride=stride, padding=1),
    "avg_3x3": lambda channels, stride: nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False),
    "conv_1x1": lambda channels, stride: conv(channels, channels, stride=stride),
    "conv_3x3": lambda channels, stride: through_quarter(channels, stride, (3, 3)),
    "conv_1x7_7x1": lambda channels, stride: through_quarter(channels, stride, (1, 7), (7, 1)),
}
"""By name: (channels, stride) -> module."""


class Cell(nn.Module):
    """before, previous: channels of the two cells in front.  halve: the cell in front has halved the size."""

    def __init__(self, before: int, previous: int, channels: int, kind: Kind, *, halve: bool) -> None:
        super().__init__()
        self.kind = kind
        self.from_previous = conv(previous, channels)
        self.from_before: nn.Module = nn.Identity()
        if halve:
            self.from_before = Halved(before, channels)
        elif before != channels:
            self.from_before = conv(before, channels)
        stride = 2 if kind is REDUCTION else 1
        self.steps = nn.ModuleList(
            OPS[step.op](channels, stride if step.state < 2 else 1) for pair in kind.sums for step in pair
        )

    def forward(self, before: Tensor, previous: Tensor) -> Tensor:
        states = [self.from_previous(previous), self.from_before(before)]
        for index, (first, second) in enumerate(self.kind.sums):
            one, other = self.steps[2 * index], self.steps[2 * index + 1]
            states.append(one(states[first.state]) + other(states[second.state]))
        return torch.cat([states[state] for state in self.kind.outputs], dim=1)


class AmoebaNetD(nn.Module):
    """layers: normal cells, in three groups.  filters: four times the channels of the stem."""

    def __init__(self, layers: int, filters: int, classes: int = 1000) -> None:
        super().__init__()
        channels = filters // 4
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels))
        before = previous = channels
        halve = False
        cells = []
        kinds = [REDUCTION, REDUCTION, *([NORMAL] * (layers // 3) + [REDUCTION]) * 3]
        for kind in kinds[:-1]:
            channels *= 2 if kind is REDUCTION else 1
            cells.append(Cell(before, previous, channels, kind, halve=halve))
            before, previous = previous, channels * len(kind.outputs)
            halve = kind is REDUCTION
        self.cells = nn.ModuleList(cells)
        self.classify = nn.Linear(previous, classes)

    def forward(self, x_BCHW: Tensor, labels: Tensor) -> dict[str, Tensor]:
        before = previous = self.stem(x_BCHW)
        for cell in self.cells:
            before, previous = previous, cell(before, previous)
        scores = self.classify(previous.mean(dim=(2, 3)))
        return {"loss": fn.cross_entropy(scores, labels)}


def job(
    layers: int = 18,
    filters: int = 208,
    *,
    pixels: int = 224,
    classes: int = 1000,
    dtype: torch.dtype = torch.float32,
) -> Job:
    """AmoebaNet-D on made-up images."""

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "x_BCHW": torch.randn(rows, 3, pixels, pixels, generator=generator, dtype=dtype),
            "labels": torch.randint(classes, (rows,), generator=generator),
        }

    return Job(
        model=lambda: AmoebaNetD(layers, filters, classes).to(dtype),
        batch=batch,
        name=f"AmoebaNet-D ({layers}, {filters})",
    )
