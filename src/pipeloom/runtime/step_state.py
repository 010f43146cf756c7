"""What a worker is given for a step, and what it keeps of a micro-batch between a stage's actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..ir.stages import StageGraph
from ..tracer import StageFunctions, Tensors
from .messages import Message
from .offload import AsyncCopy


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The stages for one size of micro-batch: same cut, other shapes.

    functions: of this rank's stages; those of a stage's replicas are the same.
    """

    stages: StageGraph
    functions: Mapping[int, StageFunctions]


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """One micro-batch of a step.

    weight: its share of the step's loss; the shares of a step add up to 1.
    """

    variant: Variant
    inputs: Mapping[str, Tensor]
    weight: float
    seed: int


@dataclass(eq=False)
class MicrobatchState:
    """What a stage keeps of one micro-batch between its actions. copy: of residuals that left the device."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    sends_left: int = 0
    local_bytes: int = 0
    residuals: Tensors = field(default_factory=dict)
    residual_bytes: int = 0
    copy: AsyncCopy | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    input_grads: dict[str, Tensor] = field(default_factory=dict)
    carried: Tensors = field(default_factory=dict)
    received: list[Message] = field(default_factory=list)
