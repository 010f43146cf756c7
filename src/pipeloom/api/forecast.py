"""Forecast: what a step will take, from the stages as they will run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir.cluster import Cluster, Device, Link
from ..ir.costs import StageCost
from ..ir.errors import InfeasibleError
from ..ir.plan import Plan
from ..ir.schedule import Program
from ..ir.timeline import Timeline
from ..ir.units import format_bytes
from ..runtime.calibrate import (
    measure_link,
    optimizer_ratio,
    stage_memory,
    time_clipping,
    time_optimizer,
)
from ..runtime.failure import Watch
from ..runtime.ledger import table
from ..runtime.posting import PostedChannel
from ..runtime.recorder import Clock
from ..runtime.rehearsal import drawn, time_actions, with_times
from ..runtime.weights import MakeOptimizer, Weights
from ..runtime.worker import Variant
from ..simulator import simulate

DRAWS = 15
"""Simulated steps of which a prediction is the middle one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Forecast:
    """One rank's part in predicting a step; all ranks call the same method.

    sample: one micro-batch.  rounds: of the schedule per step.  clips: gradients, by their global norm.
    """

    plan: Plan
    program: Program
    variant: Variant
    sample: Mapping[str, Tensor]
    weights: Weights
    optimizer: MakeOptimizer | None
    rounds: int
    clips: bool
    channel: PostedChannel
    watch: Watch
    clock: Clock
    device: torch.device

    def untimed(self) -> Timeline:
        """A step with exact memory and times in units of a forward.

        Raises: InfeasibleError if a rank needs more than its cap.
        """
        cluster = self._cluster(Link(bandwidth_bytes_per_s=1e15))
        timeline = simulate(self.program, self.variant.stages, self._gather(self._memory()), cluster)
        for rank, (cap, peak) in enumerate(zip(self.plan.caps, timeline.peaks, strict=False)):
            if (need := sum(peak.values())) > cap:
                raise InfeasibleError(
                    f"rank {rank} needs {format_bytes(need)}, its cap is {format_bytes(cap)}\n{table(peak)}",
                    hint="plan again with smaller micro-batches, more stages or a higher cap",
                )
        return timeline

    def timed(self, cluster: Cluster | None) -> Timeline:
        """A step with measured times: of several simulated ones, with times drawn at random, the middle one.

        cluster: None to measure the link between ranks 0 and 1.
        """
        step_s = time_optimizer(self.weights, self.clock)
        if self.clips:
            step_s += time_clipping(self.weights, self.channel, self.clock)
        mine = self._memory()
        self.channel.all_reduce(torch.zeros(1, device=self.device))  # all start together
        spans = time_actions(
            self.program, self.variant, self.sample, self.weights,
            rank=self.channel.rank, clock=self.clock, watch=self.watch,
        )  # fmt: skip
        share = step_s / len(mine)
        costs = self._gather({index: with_times(cost, index, spans, share) for index, cost in mine.items()})
        spans = {key: took for found in self.channel.all_gather_object(spans) for key, took in found.items()}
        if cluster is None:
            sizes = [v.bytes for values in self.variant.stages.between.values() for v in values]
            size = max(sizes, default=0)
            cluster = self._cluster(measure_link(self.channel, size, self.clock, self.device))
        steps = [
            simulate(
                self.program, self.variant.stages, costs, cluster, own_s=drawn(self.program, spans, seed)
            )
            for seed in range(DRAWS)
        ]
        return sorted(steps, key=lambda step: step.step_s)[DRAWS // 2]

    def _memory(self) -> dict[int, StageCost]:
        ratio = optimizer_ratio(self.optimizer)
        batch_bytes = self.plan.microbatches * self.rounds * sum(t.nbytes for t in self.sample.values())
        return {
            index: stage_memory(
                functions, self.variant.stages, self.weights, ratio,
                batch_bytes // len(self.variant.functions),
            )
            for index, functions in self.variant.functions.items()
        }  # fmt: skip

    def _gather(self, mine: dict[int, StageCost]) -> tuple[StageCost, ...]:
        """Costs of all stages, each from its own rank."""
        everyone = [item for costs in self.channel.all_gather_object(mine) for item in costs.items()]
        return tuple(cost for _, cost in sorted(everyone, key=lambda item: item[0]))

    def _cluster(self, link: Link) -> Cluster:
        caps = self.plan.caps or (2**63,) * self.channel.ranks
        devices = tuple(Device(name=self.device.type, memory_bytes=cap) for cap in caps)
        return Cluster(devices=devices, within_node=link)
