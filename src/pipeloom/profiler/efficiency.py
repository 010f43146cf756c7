"""The share of the roofline that each class of ops achieves: from a small model with ops of all classes.

The roofline's time of an op is work / share + launches, so with the sums over all ops of a class

    share = roofline at share 1, without launches / (measured - launches)

makes the estimate of the whole class right for the reference model. What remains for other models is that
ops of one class differ, and that caches help small tensors: the spread over the ops is given with each share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import thread_time

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ir.cluster import Device
from ..ir.graph import Op
from ..ir.profile import OpCost
from ..tracer.autocast import Autocast
from ..tracer.capture import capture
from ..tracer.job import Job
from .measure_ops import measure
from .measurement import Measurement
from .roofline import roofline
from .rules import rule_of

HEADS = 8


@dataclass(frozen=True)
class ReferenceSizes:
    """Of the reference model: as large as to need the device's memory rather than its caches."""

    rows: int
    length: int
    width: int
    vocabulary: int
    channels: int
    pixels: int


ON_CPU = ReferenceSizes(rows=4, length=256, width=512, vocabulary=4096, channels=32, pixels=32)
ON_GPU = ReferenceSizes(rows=8, length=1024, width=2048, vocabulary=32768, channels=128, pixels=56)


class ReferenceModel(nn.Module):
    """A transformer block with both kinds of attention, convolutions with batch normalisation, and a loss."""

    def __init__(self, sizes: ReferenceSizes) -> None:
        super().__init__()
        width = sizes.width
        self.embed = nn.Embedding(sizes.vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, sizes.vocabulary)
        self.colours = nn.Conv2d(sizes.channels, sizes.channels, 1)
        self.picture = nn.Conv2d(sizes.channels, sizes.channels, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(sizes.channels)

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        x = self.embed(tokens)
        rows, length, width = x.shape
        heads = self.attend(self.norms[0](x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        before = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        around = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.project((before + around).transpose(1, 2).reshape(rows, length, width))
        x = x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))
        scores = self.head(self.norms[2](x))
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
        shown = functional.relu(self.batch_norm(self.picture(self.colours(images))))
        weights = torch.softmax(shown.flatten(2), dim=-1)
        return loss + (weights * shown.flatten(2)).mean()


def measure_efficiency(
    device: Device,
    where: torch.device,
    *,
    sizes: ReferenceSizes,
    autocast: Autocast | None,
    budget_s: float,
) -> list[Measurement]:
    """The share per class of ops, named by class, with the lowest and highest of single ops.

    device: its peak rates, bandwidth and launch time; its own efficiencies do not matter.
    """

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        images = (rows, sizes.channels, sizes.pixels, sizes.pixels)
        return {
            "tokens": torch.randint(sizes.vocabulary, (rows, sizes.length), generator=generator),
            "images": torch.randn(images, generator=generator),
        }

    job = Job(
        name="reference", model=lambda: ReferenceModel(sizes), batch=batch, loss=lambda output, _: output
    )
    captured = capture(job, sizes.rows, autocast=autocast)
    costs = measure(
        captured, where.type, batch=batch(0, sizes.rows), budget_s=budget_s, clock=thread_time
    ).costs
    plain = replace(device, efficiency={}, launch_s=0.0)
    return efficiency_by_class(
        captured.graph.ops, roofline(captured.graph, plain).costs, costs, device.launch_s
    )


def efficiency_by_class(
    ops: tuple[Op, ...], ideal: Mapping[str, OpCost], real: Mapping[str, OpCost], launch_s: float
) -> list[Measurement]:
    """Per class of ops, ideal over real seconds.

    ideal: without launches.  real: with them; a launch is taken off each kernel that the ideal has.
    """
    sums: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for op in ops:
        kind = rule_of(op.target).kind
        fast, slow = (
            (cost.forward_s, cost.input_grad_s, cost.weight_grad_s)
            for cost in (ideal[op.name], real[op.name])
        )
        kernels = [(a, max(b - launch_s, 0.1 * b)) for a, b in zip(fast, slow, strict=True) if a > 0 < b]
        if kind != "free" and not op.view and kernels:
            sums[kind].append((sum(a for a, _ in kernels), sum(b for _, b in kernels)))
    return [_share(kind, pairs) for kind, pairs in sorted(sums.items())]


def _share(kind: str, pairs: list[tuple[float, float]]) -> Measurement:
    """Over all ops together, and over each of those that take at least a hundredth of the class's time."""
    fast, slow = (sum(pair[i] for pair in pairs) for i in (0, 1))
    single = [a / b for a, b in pairs if b >= slow / 100]
    return Measurement(
        name=kind, value=fast / slow, low=min(single), high=max(single), unit="", of=f"{len(single)} ops"
    )
