"""What this rank's stages, optimizer and link take: memory from their graphs, times from running them.

All ranks calibrate at the same time, so that they share caches and memory bandwidth as they will in a step.
How long the stages' actions take: see `rehearsal.py`.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Collection
from dataclasses import replace

import torch

from ...ir.action import RECOMPUTE, REDUCE, STEP, B, F, I, W
from ...ir.costs import StageCost
from ...ir.stages import StageGraph
from ...tracer.stage.functions import StageFunctions
from ..ledger import crossing_bytes
from ..posted_channel import PostedChannel
from ..recorder import Clock
from ..weights import Weights, clip_factor

STEPS, LONG_STEPS, LONG_S = 6, 2, 0.1
"""Timed optimizer steps; so many where the first one, which does not count, takes longer than this."""


def graph_memory(functions: StageFunctions, stages: StageGraph) -> StageCost:
    """A StageCost with the bytes of a stage's graphs alone, and times of 1 s for F, I and W and 2 s for B."""
    sent, back = crossing_bytes(stages, functions.index)
    residual = sum(functions.residual_bytes.values())
    dropped = sum(functions.residual_bytes[name] for name in functions.recomputed)
    away = sum(functions.residual_bytes[name] for name in functions.offloaded)
    peak = functions.peak_bytes
    return StageCost(
        forward_s=1.0,
        backward_s=2.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        residual_bytes=residual,
        recomputed_bytes=dropped,
        offloaded_bytes=away,
        carried_bytes=functions.carried_bytes,
        keeps_inputs=not functions.kept_inputs.isdisjoint(functions.received),
        transient_bytes={
            F: max(0, peak["forward"] - (residual - dropped) - sent),
            RECOMPUTE: max(0, peak.get("recompute", 0) - dropped),
            B: max(0, peak.get("backward", 0) - back),
            I: max(0, peak.get("input_grad", 0) - back),
            W: max(0, peak.get("weight_grad", 0)),
        },
    )


def stage_memory(
    functions: StageFunctions,
    stages: StageGraph,
    weights: Weights,
    *,
    batch_bytes: int,
    counted: Collection[str] = (),
) -> StageCost:
    """`graph_memory` with all else that a rank holds for the stage.

    batch_bytes: of the whole batch.
    counted: parameters and buffers that another stage of the rank counts.
    """
    params = {name: weights.params[name] for name in functions.params}
    uncounted = [param for name, param in params.items() if name not in counted]
    trained = sum(p.nbytes for p in uncounted if p.requires_grad)
    stepped = [weights.update_bytes[n] for n in params if n in weights.stepped and n not in counted]
    graph_cost = graph_memory(functions, stages)
    return replace(
        graph_cost,
        static_bytes={
            "parameters": sum(p.nbytes for p in uncounted) + trained * (weights.copies - 1),
            "gradients": trained * weights.gradient_sets,
            "optimizer": sum(update.state for update in stepped),
            "buffers": sum(weights.buffers[n].nbytes for n in functions.buffers if n not in counted),
            "batch": batch_bytes,
        },
        transient_bytes={**graph_cost.transient_bytes, STEP: weights.step_bytes, REDUCE: 0},
        tied_bytes={n: params[n].nbytes for n in stages.tied if n in params and params[n].requires_grad},
    )


def time_optimizer(weights: Weights, clock: Clock) -> float:
    """Seconds of one optimizer step. It runs on copies of the optimizer's state, so for this time there are
    two; parameters, state and random numbers stay as they are."""
    optimizers = weights.optimizers
    if not weights.stepped:
        return 0.0
    params = weights.params.values()
    values = [p.detach().clone() for p in params]
    groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
    states, gradients = [dict(optimizer.state) for optimizer in optimizers], weights.last_gradients
    newest, previous = weights.newest, {name: tensor.clone() for name, tensor in weights.previous.items()}
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.state.update(copy.deepcopy(state, {id(p): p for p in state}))
    times_s: list[float] = []
    try:
        with torch.random.fork_rng({p.device for p in params if p.is_cuda}):
            while len(times_s) < (LONG_STEPS if times_s and times_s[0] > LONG_S else STEPS):
                for name in weights.summed.sums:
                    weights.summed.total(name)
                start = clock.mark()
                weights.step()
                times_s.append(clock.seconds(start, clock.mark()))
    finally:
        for optimizer, state, own in zip(optimizers, states, groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, own, strict=True):
                group.clear()
                group.update(before)
        with torch.no_grad():
            for p, value in zip(params, values, strict=True):
                p.copy_(value)
        weights.restart_versions(newest, previous)
        weights.last_gradients = gradients
        weights.discard_gradients()
    return statistics.median(times_s[1:])  # the first one may make the state


def time_clipping(weights: Weights, channel: PostedChannel, clock: Clock) -> float:
    """Seconds that clipping takes: finding the global norm, scaling the gradients, which any norm does here.
    Every rank calls it."""
    times_s = []
    for _ in range(STEPS):
        for name in weights.summed.sums:
            weights.summed.total(name)
        start = clock.mark()
        squares = weights.norm_squares(list(weights.summed.sums)).reshape(1)
        channel.all_reduce(squares)
        weights.scale_gradients(clip_factor(squares.sqrt(), 0.0))
        times_s.append(clock.seconds(start, clock.mark()))
    weights.discard_gradients()
    return statistics.median(times_s)
