"""Shapes of GPT 1.3B, 2.2B and 3.8B on 8 and 64 V100 of 16 GB, beside PipeDream-2BW (arXiv 2006.09503).

    python bench/shapes.py        2 minutes of one core

Machines are like p3.16xlarge: eight V100 joined by NVLink, and one network port of 25 Gb/s. For each model,
number of devices and batch: the best shape (width, depth, rows per micro-batch, recomputation) in closed
form for inter-layer model parallelism (one micro-batch at a time), GPipe, 1F1B with a flush, and 2BW; then
the same where everything is recomputed, as the paper has it, and at the paper's depths. All of it twice:
with the figures of the built-in device, and with its time per kernel fitted to one curve of the paper (1.3B,
w = 1, d = 8, recomputed, over rows per micro-batch): that time decides what larger micro-batches gain.

The best shapes with the fitted device are also planned by op and simulated, all pipelines side by side.

The models are as Megatron-LM had them in 2020: attention in separate products, dropout, the embedding tied to
the head. For `pipeloom plan bench/shapes.py:gpt_2_2b` as well.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from machine import print_stamp, print_table
from torch import Tensor, nn
from torch.nn import functional

from pipeloom import Job, capture
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.graph import OpGraph, UpdateBytes
from pipeloom.plan_request import PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel, interpolate_sample
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.shape_search import (
    BlockCosts,
    PipelineShape,
    RankedShape,
    ShapeRequest,
    block_costs,
    memory,
    rank_shapes,
    throughput,
)
from pipeloom.profiler.roofline import roofline

VOCABULARY, LENGTH, DROPOUT = 51200, 512, 0.1

STATE_BYTES = 8.0
"""Bytes of optimizer state per byte of half-precision parameters: float32 master and gradient, and Adam's two
moments, 16 bytes for 2 (what the released code keeps with a flush)."""


@dataclass(frozen=True)
class GptShape:
    layers: int
    hidden: int
    heads: int


SHAPES = {
    "1.3B": GptShape(24, 2048, 16),
    "2.2B": GptShape(32, 2304, 32),
    "3.8B": GptShape(32, 3072, 32),
}


class Block(nn.Module):
    """Shapes: B batch, S sequence, D hidden, H heads."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        hidden, self.heads = shape.hidden, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x_BSD: Tensor, future_SS: Tensor) -> Tensor:
        b, s, d = x_BSD.shape
        heads = self.qkv(self.norm1(x_BSD)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (d // self.heads) ** -0.5
        weights = self.dropout(scores.masked_fill(future_SS, float("-inf")).softmax(-1))
        mixed = (weights @ v).transpose(1, 2).reshape(b, s, d)
        x_BSD = x_BSD + self.dropout(self.out(mixed))
        return x_BSD + self.dropout(self.down(functional.gelu(self.up(self.norm2(x_BSD)))))


class Gpt(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.places = nn.Embedding(LENGTH, shape.hidden)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        order = torch.arange(LENGTH, device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.places(order))
        future = order[:, None] < order[None, :]
        for block in self.blocks:
            x = block(x, future)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return {"loss": functional.cross_entropy(logits.float(), targets.flatten())}


def batch_of(seed: int, rows: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def job(shape: GptShape, name: str) -> Job:
    return Job(model=lambda: Gpt(shape).half(), batch=batch_of, name=f"GPT {name}")


def gpt_1_3b() -> Job:
    return job(SHAPES["1.3B"], "1.3B")


def gpt_2_2b() -> Job:
    return job(SHAPES["2.2B"], "2.2B")


def gpt_3_8b() -> Job:
    return job(SHAPES["3.8B"], "3.8B")


# --- the search -----------------------------------------------------------------------------------

METHODS = ("one by one", "gpipe", "flush", "2bw")
KINDS = ("best", "recomputed", "at_the_papers_depth")
SIZES = (2, 8)
"""Rows of the micro-batches that models are captured with."""

BATCHES = {8: (64, 256), 64: (512, 2048)}
PAPER = {
    ("2.2B", 8, 64): (7, 18, 26, 43),
    ("2.2B", 8, 256): (7, 18, 38, 44),
    ("2.2B", 64, 512): (11, 80, 110, 160),
    ("2.2B", 64, 2048): (12, 80, 145, 168),
    ("3.8B", 64, 512): (10, 38, 75, 127),
    ("3.8B", 64, 2048): (12, 38, 115, 135),
}
"""(model, devices, batch) -> sequences per second by method, read off the paper's plots by a third party."""

DEPTHS = {"2.2B": 8, "3.8B": 16}
"""What the paper's planner chose."""

CURVE = {1: 31, 2: 47, 4: 58, 8: 63, 16: 66}
"""Rows per micro-batch -> sequences per second of 1.3B, w = 1, d = 8, recomputed (figure 12, read off)."""

KERNEL_S = tuple(step * 1e-6 for step in range(4, 121, 4))
"""Seconds per kernel that are tried for the curve."""

NVLINK = Link(bandwidth_bytes_per_s=47.9e9, latency_s=5e-6)
NETWORK = Link(bandwidth_bytes_per_s=2.8e9, latency_s=3e-5)
"""Nine tenths of 25 Gb/s."""


def machines(devices: int, kernel_s: float | None = None) -> Cluster:
    """kernel_s: what starting a kernel takes; None for the built-in figure."""
    nodes = devices // 8
    known = find_cluster(f"{nodes} nodes of 8 x v100-16" if nodes > 1 else "8 x v100-16")
    each = [
        replace(device, group=None, launch_s=device.launch_s if kernel_s is None else kernel_s)
        for device in known.devices
    ]
    network = NETWORK if nodes > 1 else None
    return replace(
        known,
        devices=tuple(each),
        groups={},
        within_node=NVLINK,
        between_nodes=network,
        node_link=network,
    )


def with_state(graph: OpGraph) -> OpGraph:
    return graph.with_updates(
        {p.name: UpdateBytes(state=int(STATE_BYTES * p.bytes), step=p.bytes) for p in graph.parameters}
    )


def profiled(graphs: Mapping[int, OpGraph], cluster: Cluster) -> list[ProfiledModel]:
    device = cluster.devices[0]
    return [
        ProfiledModel(size=size, graph=graph, profiles={device.name: roofline(graph, device)})
        for size, graph in graphs.items()
    ]


def costs_of(graphs: Mapping[int, OpGraph], cluster: Cluster) -> BlockCosts:
    first, second = profiled(graphs, cluster)
    return block_costs(first, second, cluster)


def asked(costs: BlockCosts, cluster: Cluster, batch: int, method: str, **more: Any) -> ShapeRequest:
    return ShapeRequest(
        costs=costs,
        cluster=cluster,
        global_batch=batch,
        pipelining=method,
        optimizer_bytes=STATE_BYTES,
        **more,
    )


def fitted_kernel_s(graphs: Mapping[int, OpGraph]) -> tuple[float, dict[int, float]]:
    """The time per kernel with which the curve comes out best, and what it then is."""

    def curve(kernel_s: float) -> dict[int, float]:
        cluster = machines(8, kernel_s)
        costs = costs_of(graphs, cluster)
        return {
            rows: throughput(
                asked(costs, cluster, 64 * rows, "2bw"),
                PipelineShape(width=1, depth=8, microbatch_size=rows, recompute=True),
            )
            for rows in CURVE
        }

    curves = {kernel_s: curve(kernel_s) for kernel_s in KERNEL_S}

    def off(kernel_s: float) -> float:
        return sum(log(rate / CURVE[rows]) ** 2 for rows, rate in curves[kernel_s].items())

    best = min(KERNEL_S, key=off)
    return best, {rows: round(rate, 1) for rows, rate in curves[best].items()}


def as_row(request: ShapeRequest, shape: PipelineShape) -> dict[str, Any]:
    return {
        **vars(shape),
        "microbatches": shape.microbatches(request.global_batch),
        "rows_per_s": round(throughput(request, shape), 2),
        "peak_gib": round(memory(request, shape) / 2**30, 2),
    }


def ranked(request: ShapeRequest) -> list[RankedShape]:
    try:
        return rank_shapes(request)
    except InfeasibleError:
        return []


def weigh(costs: BlockCosts, cluster: Cluster, batch: int, depth: int | None) -> dict[str, Any]:
    """By method the best shape; the best that recomputes; that at the paper's depth; how long it took."""
    found: dict[str, Any] = {}
    for method in METHODS:
        request = asked(costs, cluster, batch, method)
        begin = time.process_time()
        shapes = ranked(request)
        took = time.process_time() - begin
        again = [one for one in shapes if one.shape.recompute]
        at_depth = [one for one in again if one.shape.depth == depth]
        found[method] = {
            "best": as_row(request, shapes[0].shape) if shapes else None,
            "recomputed": as_row(request, again[0].shape) if again else None,
            "at_the_papers_depth": as_row(request, at_depth[0].shape) if at_depth else None,
            "search_cpu_s": round(took, 4),
        }
    return found


def simulated(
    graphs: Mapping[int, OpGraph], cluster: Cluster, batch: int, method: str, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Rows per second of a shape whose stages are cut by op, and whether what it holds fits."""
    width, depth = row["width"], row["depth"]
    first, second = profiled(graphs, cluster)
    request = PlanRequest(
        cluster=replace(cluster, devices=cluster.devices[: width * depth]),
        options=PlanOptions(
            ranks=depth,
            replicas=width,
            microbatches=row["microbatches"] * width,
            schedule="gpipe" if method == "gpipe" else "1f1b",
            planner="vpipe" if row["recompute"] else "exact",
            weights="2bw" if method == "2bw" else "flush",
            treatments=("recompute",) if row["recompute"] else (),
        ),
    )
    begin = time.process_time()
    try:
        plan = request.plan(interpolate_sample(first, second, row["microbatch_size"]), explained=False)
    except InfeasibleError as error:
        return {"rows_per_s": None, "why": error.message}
    turns = [stage.turn_s for stage in plan.stages]
    return {
        "rows_per_s": round(batch / plan.predicted_step_s, 2),
        "slowest_over_mean": round(max(turns) * len(turns) / sum(turns), 3),
        "peak_gib": round(max(plan.peaks) / 2**30, 2),
        "recomputed_share": round(
            sum(s.recomputed_bytes for s in plan.stages)
            / sum(s.recomputed_bytes + s.kept_bytes for s in plan.stages),
            3,
        ),
        "cpu_s": round(time.process_time() - begin, 1),
    }


def gains(found: Mapping[str, Any], kind: str) -> dict[str, float | None]:
    """2BW over the others."""
    rate = {method: (found[method][kind] or {}).get("rows_per_s") for method in METHODS}
    return {
        f"2bw / {other}": round(rate["2bw"] / rate[other], 2) if rate["2bw"] and rate[other] else None
        for other in METHODS[:-1]
    }


def measure() -> None:
    graphs: dict[str, dict[int, OpGraph]] = {}
    models = []
    for name, shape in SHAPES.items():
        begin = time.process_time()
        graphs[name] = {size: with_state(capture(job(shape, name), size).graph) for size in SIZES}
        graph = graphs[name][SIZES[0]]
        row: dict[str, Any] = {"model": name, "parameters": sum(p.bytes for p in graph.parameters) // 2}
        models.append(row | {"ops": len(graph.ops), "capture_cpu_s": round(time.process_time() - begin, 1)})
    print_table(models, "Models")
    kernel_s, curve = fitted_kernel_s(graphs["1.3B"])
    print(f"time per kernel {kernel_s * 1e6:.0f} us: {curve}", flush=True)
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    longest = 0.0
    for setting, seconds in (("built-in", None), ("fitted", kernel_s)):
        for devices, batches in BATCHES.items():
            cluster = machines(devices, seconds)
            for name in SHAPES:
                begin = time.process_time()
                costs = costs_of(graphs[name], cluster)
                costs_s = time.process_time() - begin
                for batch in batches:
                    found = weigh(costs, cluster, batch, DEPTHS.get(name))
                    case = {"device": setting, "model": name, "devices": devices, "batch": batch}
                    longest = max(longest, *(costs_s + one["search_cpu_s"] for one in found.values()))
                    paper = PAPER.get((name, devices, batch), (None,) * len(METHODS))
                    compared += [{**case, "of": kind, **gains(found, kind)} for kind in KINDS]
                    for method, theirs in zip(METHODS, paper, strict=True):
                        best = found[method]["best"]
                        if setting == "fitted" and method != METHODS[0] and best is not None:
                            best["simulated"] = simulated(graphs[name], cluster, batch, method, best)
                        shapes = {kind: found[method][kind] for kind in KINDS}
                        rows.append({**case, "method": method, "paper, rows per s": theirs, **shapes})
    print_table(rows, "Shapes")
    print_table(compared, "Gains")
    print(f"longest search after capture: {longest:.3f} s of processor time", flush=True)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print_stamp()
    measure()
    return 0


if __name__ == "__main__":
    sys.exit(main())
