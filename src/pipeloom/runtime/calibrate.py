"""What this rank's stages really take: exact memory from their graphs, times from running them alone.

All ranks calibrate at the same time, so that they share caches and memory bandwidth as they will in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..ir.action import REDUCE, STEP, B, F, I, W
from ..ir.cluster import Link
from ..ir.costs import StageCost
from ..ir.graph import Value
from ..ir.stages import StageGraph
from ..tracer.stage import StageFunctions
from .channel import Message
from .posting import PostedChannel
from .recorder import Clock
from .weights import MakeOptimizer, Weights, default_optimizer, optimizer_tensors

REPEATS = 9
"""Timed runs of each function, after one that measures memory and one that warms up."""


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
    other_bytes: int,
) -> StageCost:  # fmt: skip
    """A StageCost with exact bytes, and times of 1 s for F, I and W and 2 s for B.

    optimizer_bytes: state per byte of trainable parameter.  other_bytes: held all the time (the batch).
    """
    index = functions.index
    params = {name: weights.params[name] for name in functions.params}
    sent = sum({v.name: v.bytes for t in stages.successors[index] for v in stages.between[index, t]}.values())
    back = sum(v.bytes for s in stages.predecessors[index] for v in stages.gradients(s, index))
    residual = sum(functions.residual_bytes.values())
    trained = sum(p.nbytes for p in params.values() if p.requires_grad)
    largest = max((p.nbytes for p in params.values() if p.requires_grad), default=0)
    peak = functions.peak_bytes
    return StageCost(
        forward_s=1.0, backward_s=2.0, input_grad_s=1.0, weight_grad_s=1.0,
        residual_bytes=residual, carried_bytes=functions.carried_bytes,
        static_bytes={
            "parameters": sum(p.nbytes for p in params.values()), "gradients": trained,
            "optimizer": int(trained * optimizer_bytes),
            "buffers": sum(weights.buffers[n].nbytes for n in functions.buffers) + other_bytes,
        },
        transient_bytes={
            F: max(0, peak["forward"] - residual - sent), B: max(0, peak.get("backward", 0) - back),
            I: max(0, peak.get("input_grad", 0) - back), W: max(0, peak.get("weight_grad", 0)),
            STEP: largest, REDUCE: 0,
        },
        tied_bytes={n: params[n].nbytes for n in stages.tied if n in params and params[n].requires_grad},
    )  # fmt: skip


def time_stage(
    cost: StageCost, functions: StageFunctions, weights: Weights, inputs: Mapping[str, Tensor],
    stages: StageGraph, clock: Clock, *, split_backward: bool,
) -> StageCost:  # fmt: skip
    """Replace the times of `cost` by medians of real runs on made-up data. Leaves weights as they are.

    inputs: the batch inputs of one micro-batch.
    """
    device = next(iter(inputs.values())).device
    received = {
        v.name: functions.examples[v.name] if v.name in functions.examples else _made_up(v, device)
        for s in stages.predecessors[functions.index] for v in stages.between[s, functions.index]
    }  # fmt: skip
    spans: dict[str, list[float]] = {}
    for _ in range(REPEATS + 2):
        marks = [clock.mark()]
        outputs, residuals = functions.forward(weights.state(0), {**inputs, **received}, 0)
        marks.append(clock.mark())
        grads = {n: torch.ones_like(t) for n, t in outputs.items() if not n.startswith("buffer:")}
        names = ["F"]
        if functions.differentiable and split_backward:
            marks.append(clock.mark())
            _, carried = functions.backward_input(weights.state(0), residuals, grads)
            marks.append(clock.mark())
            functions.backward_weight(weights.state(0), carried, weights.grads)
            names += ["", "I", "W"]
        elif functions.differentiable:
            marks.append(clock.mark())
            functions.backward(weights.state(0), residuals, grads, weights.grads)
            names += ["", "B"]
        marks.append(clock.mark())
        at = [clock.seconds(m) for m in marks]
        for name, start, end in zip(names, at, at[1:], strict=False):
            spans.setdefault(name, []).append(end - start)
    weights.discard_gradients()
    median = {name: statistics.median(found[2:]) for name, found in spans.items()}
    ingoing, rest = median.get("I", 0.0), median.get("W", 0.0)
    return replace(
        cost, forward_s=median["F"], backward_s=median.get("B", ingoing + rest),
        input_grad_s=ingoing, weight_grad_s=rest,
    )  # fmt: skip


def _made_up(value: Value, device: torch.device) -> Tensor:
    dtype = getattr(torch, value.dtype)
    if dtype.is_floating_point:
        return torch.randn(value.shape, device=device).mul_(0.1).to(dtype)
    return torch.zeros(value.shape, dtype=dtype, device=device)


def time_optimizer(weights: Weights, clock: Clock) -> float:
    """Seconds of one optimizer step. Parameters and state are put back; 0 if it already has state."""
    optimizer = weights.optimizer
    if optimizer is None or optimizer.state:
        return 0.0
    kept = {name: p.detach().clone() for name, p in weights.params.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    took = []
    for _ in range(3):
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
    return statistics.median(took)


def measure_link(channel: PostedChannel, size: int, clock: Clock, device: torch.device) -> Link:
    """Latency and bandwidth between ranks 0 and 1, from echoes of 8 bytes and of `size` bytes.

    Every rank calls it; all get the same answer.
    """
    size = max(size // 4, 4096) * 4
    times = {length: _echo(channel, length, clock, device) for length in (8, size)}
    small, large = (float(t) for t in channel.broadcast_object((times[8], times[size])))
    rate = (size - 8) / max(large - small, 1e-9)
    return Link(bandwidth_bytes_per_s=rate, latency_s=small)


def _echo(channel: PostedChannel, size: int, clock: Clock, device: torch.device) -> float:
    """Seconds one way, on rank 0."""
    if channel.ranks == 1:
        return 1e-6
    value = Value(name="echo", shape=(size // 4,), dtype="float32")
    there = [Message(key=f"there{i}", source=0, target=1, values=(value,)) for i in range(REPEATS)]
    back = [Message(key=f"back{i}", source=1, target=0, values=(value,)) for i in range(REPEATS)]
    data = torch.zeros(value.shape, device=device)
    channel.begin(there if channel.rank == 1 else back if channel.rank == 0 else [])
    took = []
    for out, home in zip(there, back, strict=True):
        start = clock.mark()
        if channel.rank == 0:
            channel.send(out, [data])
            channel.receive(home)
            channel.release(home)
        elif channel.rank == 1:
            channel.receive(out)
            channel.release(out)
            channel.send(home, [data])
        took.append((clock.seconds(clock.mark()) - clock.seconds(start)) / 2)
    channel.end()
    return statistics.median(took[1:])
