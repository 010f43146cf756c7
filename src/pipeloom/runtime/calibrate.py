"""What this rank's stages, optimizer and link take: memory from their graphs, times from running them.

All ranks calibrate at the same time, so that they share caches and memory bandwidth as they will in a step.
How long the stages' own actions take: see `rehearsal.py`.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from ..ir.action import REDUCE, STEP, B, F, I, W
from ..ir.cluster import Link
from ..ir.costs import StageCost
from ..ir.graph import Value
from ..ir.stages import StageGraph
from ..tracer.stage import StageFunctions
from .channel import Message
from .ledger import crossing_bytes
from .posting import PostedChannel
from .recorder import Clock
from .weights import MakeOptimizer, Weights, default_optimizer, optimizer_tensors

REPEATS = 25
"""Echoes of each size, of which the first warms up."""

COLD_BYTES = 1 << 25
"""Written before each echo: what a step sends comes after an action that has used all of the caches."""

STEPS = 6
"""Timed optimizer steps."""


def optimizer_ratio(make: MakeOptimizer | None) -> float:
    """Bytes of optimizer state per byte of parameter, found by stepping a tiny parameter."""
    param = nn.Parameter(torch.zeros(4096))
    optimizer = (make or default_optimizer)([param])
    param.grad = torch.zeros(4096)
    optimizer.step()
    held = sum(t.nbytes for t in optimizer_tensors(optimizer) if t.numel() > 1)
    return held / param.nbytes


def stage_memory(
    functions: StageFunctions, stages: StageGraph, weights: Weights, optimizer_bytes: float,
    batch_bytes: int,
) -> StageCost:  # fmt: skip
    """A StageCost with exact bytes, and times of 1 s for F, I and W and 2 s for B.

    optimizer_bytes: state per byte of trainable parameter.  batch_bytes: of the whole batch.
    """
    index = functions.index
    params = {name: weights.params[name] for name in functions.params}
    sent, back = crossing_bytes(stages, index)
    residual = sum(functions.residual_bytes.values())
    trained = sum(p.nbytes for p in params.values() if p.requires_grad)
    peak = functions.peak_bytes
    return StageCost(
        forward_s=1.0, backward_s=2.0, input_grad_s=1.0, weight_grad_s=1.0,
        residual_bytes=residual, carried_bytes=functions.carried_bytes,
        keeps_inputs=not functions.kept_inputs.isdisjoint(functions.received),
        static_bytes={
            "parameters": sum(p.nbytes for p in params.values()), "gradients": trained,
            "optimizer": int(trained * optimizer_bytes),
            "buffers": sum(weights.buffers[n].nbytes for n in functions.buffers),
            "batch": batch_bytes,
        },
        transient_bytes={
            F: max(0, peak["forward"] - residual - sent), B: max(0, peak.get("backward", 0) - back),
            I: max(0, peak.get("input_grad", 0) - back), W: max(0, peak.get("weight_grad", 0)),
            STEP: weights.step_bytes, REDUCE: 0,
        },
        tied_bytes={n: params[n].nbytes for n in stages.tied if n in params and params[n].requires_grad},
    )  # fmt: skip


def time_optimizer(weights: Weights, clock: Clock) -> float:
    """Seconds of one optimizer step. Parameters and state are put back; 0 if it already has state."""
    optimizer = weights.optimizer
    if optimizer is None or optimizer.state:
        return 0.0
    kept = {name: p.detach().clone() for name, p in weights.params.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    took = []
    for _ in range(STEPS):
        for name in weights.grads.sums:
            weights.grads.total(name)
        start = clock.mark()
        weights.step()
        took.append(clock.seconds(clock.mark()) - clock.seconds(start))
    optimizer.state.clear()
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)
    with torch.no_grad():
        for name, p in weights.params.items():
            p.copy_(kept[name])
    weights.last_gradients = {}
    return statistics.median(took[1:])  # the first one makes the state


def time_clipping(weights: Weights, channel: PostedChannel, clock: Clock) -> float:
    """Seconds that finding the global norm of the gradients takes. Every rank calls it."""
    took = []
    for _ in range(STEPS):
        for name in weights.grads.sums:
            weights.grads.total(name)
        start = clock.mark()
        squares = weights.norm_squares(list(weights.grads.sums)).reshape(1)
        channel.all_reduce(squares)
        took.append(clock.seconds(clock.mark()) - clock.seconds(start))
    weights.discard_gradients()
    return statistics.median(took)


def measure_link(channel: PostedChannel, size: int, clock: Clock, device: torch.device) -> Link:
    """The link between ranks 0 and 1, from echoes of 8 bytes and of `size` bytes.

    Every rank calls it; all get the same answer.
    """
    size = max(size // 4, 4096) * 4
    small, large = (_echo(channel, length, clock, device) for length in (8, size))
    (one_way, sending), (one_way_large, sending_large) = channel.broadcast_object((small, large))
    rate = (size - 8) / max(one_way_large - one_way, 1e-9)
    return Link(
        bandwidth_bytes_per_s=rate, latency_s=one_way, overhead_s=sending,
        overhead_s_per_byte=max(0.0, sending_large - sending) / (size - 8),
    )  # fmt: skip


def _echo(
    channel: PostedChannel, size: int, clock: Clock, device: torch.device
) -> tuple[float, float]:
    """Seconds one way, and of that the sender's own; on rank 0."""
    if channel.ranks == 1:
        return 1e-6, 0.0
    value = Value(name="echo", shape=(size // 4,), dtype="float32")
    there = [Message(key=f"there{i}", source=0, target=1, values=(value,)) for i in range(REPEATS)]
    back = [Message(key=f"back{i}", source=1, target=0, values=(value,)) for i in range(REPEATS)]
    data = torch.zeros(value.shape, device=device)
    channel.begin(there if channel.rank == 1 else back if channel.rank == 0 else [])
    took, sending = [], []
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)
    for out, home in zip(there, back, strict=True):
        cold.fill_(1)
        fresh = data.clone()  # as a step sends what was just made
        start = clock.mark()
        if channel.rank == 0:
            channel.send(out, [fresh])
            sent = clock.mark()
            channel.receive(home)
            channel.release(home)
            took.append((clock.seconds(clock.mark()) - clock.seconds(start)) / 2)
            sending.append(clock.seconds(sent) - clock.seconds(start))
        elif channel.rank == 1:
            channel.receive(out)
            channel.release(out)
            channel.send(home, [fresh])
    channel.end()
    return (statistics.median(took[1:]), statistics.median(sending[1:])) if took else (0.0, 0.0)
