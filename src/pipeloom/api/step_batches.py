"""From the batch of a step to its micro-batches, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir.errors import BatchError
from ..ir.plan import Plan
from ..runtime.batches import split_batch
from ..runtime.loss_scaling import loss_shares
from ..runtime.step_state import Microbatch
from ..tracer.job import Job
from ..tracer.random import microbatch_seed
from .rank_stages import EvaluationVariants, TrainingVariants


@dataclass(frozen=True, kw_only=True)
class SplitBatch:
    """A batch cut into micro-batches, each with its share of the loss; or why that cannot be.

    parts: the inputs of each micro-batch, by name.
    """

    parts: tuple[Mapping[str, Tensor], ...] = ()
    shares: tuple[float, ...] = ()
    refusal: BatchError | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatches:
    """Splits batches for a plan's rank. rounds: of the schedule per training step.  seed: of random ops."""

    job: Job
    plan: Plan
    rank: int
    device: torch.device
    rounds: int
    seed: int
    training: TrainingVariants
    evaluation: EvaluationVariants

    def split(self, batch: Mapping[str, Tensor], *, training: bool) -> SplitBatch:
        """Never raises for a batch that cannot be used: the ranks have to agree on that first."""
        try:
            parts = split_batch(batch, self.plan.microbatches * (self.rounds if training else 1))
            shares = loss_shares(parts, self.job.weight)
        except BatchError as error:
            return SplitBatch(refusal=error)
        return SplitBatch(parts=tuple(parts), shares=tuple(shares))

    def microbatches(self, split: SplitBatch, *, step: int, training: bool) -> list[Microbatch]:
        """What the worker gets, with those inputs of this rank's micro-batches that its stages read.

        step: steps made before.

        Raises: BatchError if a size of micro-batch does not fit the plan.
        """
        variants = self.training if training else self.evaluation
        each = self.plan.microbatches // self.plan.replicas
        own = self.plan.replicas_on(self.rank)
        made = []
        for index, (part, share) in enumerate(zip(split.parts, split.shares, strict=True)):
            variant = variants.variant(part)
            here = index % self.plan.microbatches // each in own
            read = {name for functions in variant.functions.values() for name in functions.batch}
            made.append(
                Microbatch(
                    variant=variant,
                    inputs={n: _copy_to(self.device, t) for n, t in part.items() if here and n in read},
                    weight=share,
                    seed=microbatch_seed(self.seed, step, index),
                    number=step * each + index % each,
                )
            )
        return made

    def held_bytes(self, batch: Mapping[str, Tensor]) -> int:
        """Bytes of a batch that this rank needs: of the micro-batches of its own replicas."""
        whole = sum(tensor.nbytes for tensor in batch.values())
        return whole * self.plan.microbatches_on(self.rank) // self.plan.microbatches

    def in_rounds(self, microbatches: list[Microbatch]) -> list[list[Microbatch]]:
        """Those of each round of the schedule."""
        count = self.plan.microbatches
        return [microbatches[at : at + count] for at in range(0, len(microbatches), count)]


def _copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """From memory that is not pinned the host would wait for the device, at every tensor."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
