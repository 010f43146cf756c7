"""Forecast: what a step will take, from the stages as they will run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .clusters.names import cpu_cluster
from .ir.cluster import Cluster, Device, Link
from .ir.costs import StageCost
from .ir.errors import InfeasibleError
from .ir.plan import Plan
from .ir.schedule import Program
from .ir.shared_weights import names_for_owners
from .ir.text import format_bytes
from .ir.timeline import Timeline
from .runtime.calibrate import busy_link, stage_memory, time_clipping, time_optimizer, time_sums
from .runtime.channel import Channel
from .runtime.ledger import table
from .runtime.rank import Variant
from .runtime.recorder import Clock
from .runtime.reduce_and_step import shared_by
from .runtime.rehearsal import ActionTimes, Rehearsal, with_times
from .runtime.tier import Tier
from .runtime.transport import SMALL_BYTES
from .runtime.weights import Weights
from .simulator.all_reduce import all_gather_s, all_reduce_s
from .simulator.simulate import simulate

ENOUGH_S = 1.0
"""A forecast is made from at least as many walks as fit into this time, ..."""

LEAST_WALKS, MOST_WALKS = 3, 101
"""... within these limits, which are odd. One more before them warms up."""

LONG_S, FEW_MICROBATCHES = 1.0, 3
"""Where a walk takes longer than this, it does the actions of so many micro-batches of each stage only, and
those walks make the forecast that fit into `ENOUGH_S`, at least one, after one that warms up: no rank
computes for several steps before its first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Forecast:
    """One rank's part in predicting a step; all ranks call the same method.

    sample: one micro-batch.  clips: gradients, by their global norm.
    tier: where residuals go that the plan offloads.
    """

    plan: Plan
    program: Program
    variant: Variant
    sample: Mapping[str, Tensor]
    weights: Weights
    clips: bool
    channel: Channel
    clock: Clock
    device: torch.device
    tier: Tier | None

    def untimed(self) -> Timeline:
        cluster = self.cluster(Link(bandwidth_bytes_per_s=1e15))
        timeline = self._simulated(self._of_all_ranks(self.memory()), cluster)
        for rank, (cap, peak) in enumerate(zip(self.plan.caps, timeline.peaks, strict=False)):
            if (need := sum(peak.values())) > cap:
                raise InfeasibleError(
                    f"rank {rank} needs {format_bytes(need)}, its cap is {format_bytes(cap)}\n{table(peak)}",
                    hint="plan again with smaller micro-batches, more stages or a higher cap",
                )
        return timeline

    def planned(self) -> Timeline:
        """A step with exact memory and the times of the plan, for which nothing is run."""
        costs = self._of_all_ranks(self.memory())
        for index, cost in costs.items():
            stage = self.plan.stages[index % len(self.plan.stages)]
            # A recomputation of its own is an action; any other is part of the backward.
            again_s = 0.0 if index % len(self.plan.stages) in self.plan.memory.ahead else stage.recompute_s
            costs[index] = replace(
                cost,
                forward_s=stage.forward_s,
                backward_s=stage.input_grad_s + stage.weight_grad_s + again_s,
                input_grad_s=stage.input_grad_s + again_s,
                weight_grad_s=stage.weight_grad_s,
                recompute_s=stage.recompute_s,
                offload_s=stage.offload_s,
                reload_s=stage.reload_s,
            )
        return self._simulated(costs, self.cluster(cpu_cluster(self.channel.ranks).within_node))

    def rehearsed(self, cluster: Cluster | None) -> Timeline:
        """A step with the times that actions take on every rank alone, but on all of them at once, as they
        share caches, memory and cores in a step too.

        cluster: None to measure the link between ranks 0 and 1.
        Returns: of several steps, simulated with the times of one walk each, the middle one.
        """
        channel, clock, weights, stages = self.channel, self.clock, self.weights, self.variant.stages
        update_s = time_optimizer(weights, clock)
        if self.clips:
            update_s += time_clipping(weights, channel, clock)
        walks = self._walks(self.rehearsal())
        if cluster is None:
            action_s = statistics.median(sum(walk.values()) for walk in walks) / max(1, len(walks[0]))
            size = max((v.bytes for values in stages.between.values() for v in values), default=0)
            cluster = self.cluster(busy_link(channel, size, clock, self.device, action_s=action_s))
        if stages.tied and self.plan.steady is None:  # else sums run beside the next steps
            shared = shared_by(stages, self.program.placement, channel.rank, weights.shares)
            sums_s = time_sums(weights, shared, channel, clock)
            for part in shared:
                part_bytes = sum(weights.params[name].nbytes for name in part.names)
                sums_s -= all_reduce_s(part_bytes, part.ranks, cluster)  # which the simulated step has
            update_s += max(0.0, sums_s)
        if weights.shares:  # what replicas have updated for each other is sent within STEP
            shares = weights.shares[channel.rank]
            size = sum(weights.params[name].nbytes for name in shares.owner)
            update_s += all_gather_s(size, shares.ranks, cluster)
        memory, steps = self.memory(), []
        for walk in walks:
            costs = {i: with_times(cost, i, walk, update_s / len(memory)) for i, cost in memory.items()}
            steps.append(self._timed(costs, walk, cluster))
        return sorted(steps, key=lambda step: step.step_s)[len(steps) // 2]

    def _timed(self, costs: Mapping[int, StageCost], walk: ActionTimes, cluster: Cluster) -> Timeline:
        """Each action takes as long as in the walk, because a step waits for the slower of two ranks again
        and again: with mean times it would look shorter.

        costs, walk: of this rank."""
        walks = self.channel.all_gather_object(walk)
        action_s = {action: seconds for each in walks for action, seconds in each.items()}
        return self._simulated(self._of_all_ranks(costs), cluster, action_s)

    def rehearsal(self) -> Rehearsal:
        rank = self.channel.rank
        return Rehearsal(
            self.program,
            self.variant,
            self.sample,
            self.weights,
            rank=rank,
            clock=self.clock,
            watch=self.channel.watch,
            tier=self.tier,
            cap_bytes=self.plan.caps[rank] if self.plan.caps else None,
        )

    def _walks(self, rehearsal: Rehearsal) -> list[ActionTimes]:
        few, least = None, LEAST_WALKS
        if self._mean_s(self._walk(rehearsal, 1)) > LONG_S:
            few, least = FEW_MICROBATCHES, 1
        self._walk(rehearsal, few)  # in memory that nothing has used yet, which may take half as long again
        walks = [self._walk(rehearsal, few)]
        walk_s = self._mean_s(walks[0])
        if few is not None:
            walk_s *= min(1.0, few / self.plan.microbatches)
        return walks + [self._walk(rehearsal, few) for _ in range(1, number_of_walks(walk_s, least))]

    def _walk(self, rehearsal: Rehearsal, microbatches: int | None) -> ActionTimes:
        self.channel.all_reduce(torch.zeros(1, device=self.device))  # all start together
        return rehearsal.time_actions(microbatches)

    def _mean_s(self, walk: ActionTimes) -> float:
        """Seconds of a walk, on average over the ranks; the same on all of them."""
        took = torch.tensor([sum(walk.values())], device=self.device)
        self.channel.all_reduce(took)
        return float(took) / self.channel.ranks

    def _of_all_ranks(self, costs: Mapping[int, StageCost]) -> dict[int, StageCost]:
        gathered = self.channel.all_gather_object(costs)
        return {index: cost for rank_costs in gathered for index, cost in rank_costs.items()}

    def _simulated(
        self, costs: Mapping[int, StageCost], cluster: Cluster, action_s: ActionTimes | None = None
    ) -> Timeline:
        return simulate(
            self.program,
            self.variant.stages,
            tuple(costs[index] for index in sorted(costs)),
            cluster,
            action_s=action_s,
            caps=self.plan.caps,
            small_bytes=SMALL_BYTES if self.device.type == "cpu" else 0,
        )

    def memory(self) -> dict[int, StageCost]:
        """This rank's stages: exact bytes, times in units of a forward."""
        alive = 1 if self.plan.steady is None else self.plan.steady.window
        read = {name for functions in self.variant.functions.values() for name in functions.batch}
        whole = self.device.type == "cpu"  # others get what their rank's stages read
        sample_bytes = sum(t.nbytes for name, t in self.sample.items() if whole or name in read)
        batch_bytes = self.plan.microbatches_on(self.channel.rank) * alive * sample_bytes
        shares, stages = self.weights.shares, self.variant.stages
        rows = names_for_owners(stages, self.plan.placement, shares) if shares else ()
        for_owners = rows[self.channel.rank] if rows else frozenset[str]()
        costs: dict[int, StageCost] = {}
        counted: set[str] = set()
        for index, functions in self.variant.functions.items():
            size = 0 if costs else batch_bytes
            held = stage_memory(functions, stages, self.weights, batch_bytes=size, counted=counted)
            costs[index] = replace(held, for_owners=for_owners)
            counted.update(functions.params, functions.buffers)
        return costs

    def cluster(self, link: Link) -> Cluster:
        caps = self.plan.caps or (2**63,) * self.channel.ranks
        devices = tuple(Device(name=self.device.type, memory_bytes=cap) for cap in caps)
        return Cluster(devices=devices, within_node=link)


def number_of_walks(walk_s: float, least: int) -> int:
    """How many walks a forecast is made of: an odd number, or the slower one would be the middle of two.

    walk_s: seconds of one.  least: of them, odd.

    >>> number_of_walks(0.8, least=1), number_of_walks(2.0, least=1), number_of_walks(0.2, least=3)
    (3, 1, 5)
    """
    return min(max(least, math.ceil(ENOUGH_S / max(walk_s, 1e-6))) | 1, MOST_WALKS)
