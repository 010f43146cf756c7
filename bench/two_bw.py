"""PipeDream-2BW (arXiv 2006.09503): is the pipeline full, and which shapes win?

    python bench/two_bw.py paced wide [--steps 4] [--rounds 4]
    python bench/two_bw.py shapes                  2 minutes of one core

paced        Four stages, eight micro-batches per pipeline; every rank is a process with the real worker,
             messages over gloo and stages that sleep. The bubble-free rate is one step per m micro-batches
             of the slowest rank. 1F1B drains: m / (m + d - 1) of that at best, 8/11. 2BW also with clipping,
             with a sum of tied gradients, and with two pipelines whose sum of gradients takes half a step.
             The simulator gets the same program and times.
wide         A GPT of 8 layers of width 256 on two ranks of one thread, in turns: one process alone, two such
             processes at once, 1F1B, 2BW. Timed are the steps between two moments at which the pipeline is
             full. "limit" is one process alone over each of two at once. Per micro-batch 2BW pays what the
             stages differ by, or the two messages that the first stage waits for, whichever is more.
shapes       GPT 1.3B, 2.2B and 3.8B on 8 and 64 V100 of 16 GB, machines like p3.16xlarge. The best shape
             (width, depth, rows, recomputation) in closed form for inter-layer model parallelism, GPipe,
             1F1B and 2BW; with everything recomputed, and at the paper's depths. The time per kernel is
             fitted to one curve of the paper. The models are as Megatron-LM had them in
             2020; for `pipeloom plan bench/two_bw.py:gpt_2_2b` as well.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any

import torch
import torch.distributed as dist
from machine import by_roofline, changed, next_tokens, on_ranks, parser_of, print_table, run_parts
from pacing import pace
from torch import Tensor, nn
from torch.nn import functional

from pipeloom import Job, Pipeline, Plan, capture, plan
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.graph import OpGraph, UpdateBytes
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.shape_search import (
    BlockCosts,
    PipelineShape,
    ShapeRequest,
    block_costs,
    memory,
    rank_shapes,
    throughput,
)
from pipeloom.planning import profile
from pipeloom.runtime.channel import local_channels
from pipeloom.runtime.connect import connect
from pipeloom.train.config import Config, ModelConfig, PipelineConfig
from pipeloom.train.workload import job_of

CPU = torch.device("cpu")
BUBBLE_FREE, ERROR = 0.97, 0.03

# --- ranks that sleep -----------------------------------------------------------------------------

DEPTH, MICROBATCHES = 4, 8


def paced(steps: int, seconds: float) -> bool:
    shape = {"microbatches": MICROBATCHES, "seconds": seconds, "rounds": steps}
    rows = [row for ranks in (DEPTH, 2 * DEPTH) for row in pace("steady", ranks=ranks, **shape)]
    for row in rows:
        row["of_bubble_free"] = row["ideal_s"] / row["measured_s"]
    print_table(rows, f"Ranks that sleep for {seconds:g} s per micro-batch")
    return all(row["of_bubble_free"] >= BUBBLE_FREE and abs(row["error"]) <= ERROR for row in rows[1:])


# --- ranks that compute ---------------------------------------------------------------------------

FILLING = 2
"""Steps at the start of each segment that are not timed."""

WIDE = Config(
    model=ModelConfig(layers=8, width=256),
    pipeline=PipelineConfig(microbatches=MICROBATCHES, microbatch_size=2),
)


def plans(config: Config) -> dict[str, Plan]:
    """Of a GPT: uncut, and in two stages by two schedules."""
    job, size = job_of(config), config.pipeline.microbatch_size
    captured = capture(job, size)
    shared = {"microbatches": MICROBATCHES, "microbatch_size": size, "captured": captured}
    shared["profiled"] = profile(captured)
    return {
        "one": plan(job, ranks=1, schedule="1f1b", **shared),
        "1f1b": plan(job, ranks=2, schedule="1f1b", **shared),
        "2bw": plan(job, ranks=2, schedule="1f1b", weights="2bw", **shared),
    }


def steady_s(pipeline: Pipeline, batch: dict[str, Tensor], steps: int) -> float:
    """Seconds a step, of `steps` of them behind those that fill the pipeline and before it drains."""
    asked = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for _ in range(FILLING + steps + 1):
            asked.append(time.perf_counter())
            yield batch

    for _ in pipeline.steps(batches()):
        pass
    return (asked[-1] - asked[FILLING]) / steps


def compute(made: dict[str, Plan], config: Config, steps: int, rounds: int) -> dict[str, Any]:
    """What one of two ranks runs: all parties in turns."""
    group = connect(CPU, timeout_s=300)
    rank, job, size = dist.get_rank(), job_of(config), config.pipeline.microbatch_size
    batch, captured = job.batch(0, MICROBATCHES * size), capture(job, size)
    seconds: dict[str, list[float]] = {name: [] for name in ("limit", *made)}
    alone = Pipeline(job, made["one"], channel=local_channels(1)[0], captured=captured)
    together = {
        n: Pipeline(job, one, captured=captured, group=group) for n, one in made.items() if n != "one"
    }
    for number in range(rounds + 1):  # the first one warms up
        taken: dict[str, float] = {}
        dist.barrier(group)
        if rank == 0:
            taken["one"] = steady_s(alone, batch, steps)
        dist.barrier(group)
        rate = torch.tensor(1 / steady_s(alone, batch, steps))
        dist.all_reduce(rate, group=group)
        taken["limit"] = 1 / float(rate)
        for name, pipeline in together.items():
            dist.barrier(group)
            taken[name] = steady_s(pipeline, batch, steps)
        for name, took in taken.items() if number else ():
            seconds[name].append(took)
    errors = {}
    for name, pipeline in together.items():
        assert pipeline.report is not None
        peaks = ((pipeline.expected.peak_bytes(r), pipeline.report.peak_bytes[r]) for r in range(2))
        errors[name] = max(abs(predicted / measured - 1) for predicted, measured in peaks)
    for pipeline in reversed(together.values()):
        pipeline.close()
    alone.close()
    return {"seconds": seconds, "errors": errors}


def real(steps: int, rounds: int) -> bool:
    config = WIDE
    made = plans(config)
    seen = on_ranks(compute, 2, made, config, steps, rounds)[0]
    seconds = seen["seconds"]
    limits = [one / both for one, both in zip(seconds["one"], seconds["limit"], strict=True)]
    rows = []
    for pipeline, error in seen["errors"].items():
        speedups = [one / own for one, own in zip(seconds["one"], seconds[pipeline], strict=True)]
        shares = [speedup / most for speedup, most in zip(speedups, limits, strict=True)]
        row: dict[str, Any] = {"pipeline": pipeline, "step_s": statistics.median(seconds[pipeline])}
        row |= {"over_one_process": statistics.median(speedups), "of_limit": statistics.median(shares)}
        rows.append(row | {"peak_error": error})
    print(f"limit over one process {statistics.median(limits):.3f}")
    print_table(rows, f"Two ranks, {config.model.layers} layers of width {config.model.width}")
    steady = rows[-1]
    return bool(steady["peak_error"] <= ERROR and steady["of_limit"] >= BUBBLE_FREE)


# --- shapes: the models ---------------------------------------------------------------------------

VOCABULARY, LENGTH, DROPOUT = 51200, 512, 0.1

STATE_BYTES = 8.0
"""Bytes of optimizer state per byte of half-precision parameters: float32 master and gradient, and Adam's two
moments, 16 bytes for 2 (what the released code keeps with a flush)."""


@dataclass(frozen=True)
class GptShape:
    layers: int
    hidden: int
    heads: int


SHAPES = {"1.3B": GptShape(24, 2048, 16), "2.2B": GptShape(32, 2304, 32), "3.8B": GptShape(32, 3072, 32)}


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


def job(name: str) -> Job:
    batch = next_tokens(VOCABULARY, LENGTH)
    return Job(model=lambda: Gpt(SHAPES[name]).half(), batch=batch, name=f"GPT {name}")


gpt_1_3b, gpt_2_2b, gpt_3_8b = (partial(job, name) for name in SHAPES)

# --- shapes: the search ---------------------------------------------------------------------------

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

Graphs = Mapping[int, OpGraph]
"""Rows -> a model captured with so many."""


def machines(devices: int, kernel_s: float | None = None) -> Cluster:
    """kernel_s: what starting a kernel takes; None for the built-in figure."""
    nodes = devices // 8
    known = find_cluster(f"{nodes} nodes of 8 x v100-16" if nodes > 1 else "8 x v100-16")
    known = changed(known, group=None, **({} if kernel_s is None else {"launch_s": kernel_s}))
    network = NETWORK if nodes > 1 else None
    return replace(known, groups={}, within_node=NVLINK, between_nodes=network, node_link=network)


def with_state(graph: OpGraph) -> OpGraph:
    return graph.with_updates(
        {p.name: UpdateBytes(state=int(STATE_BYTES * p.bytes), step=p.bytes) for p in graph.parameters}
    )


def profiled(graphs: Graphs, cluster: Cluster) -> list[ProfiledModel]:
    return [by_roofline(graph, cluster, size) for size, graph in graphs.items()]


def asked(costs: BlockCosts, cluster: Cluster, batch: int, method: str) -> ShapeRequest:
    return ShapeRequest(
        costs=costs, cluster=cluster, global_batch=batch, pipelining=method, optimizer_bytes=STATE_BYTES
    )


def fitted_kernel_s(graphs: Graphs) -> tuple[float, dict[int, float]]:
    """The time per kernel with which the curve comes out best, and what it then is."""

    def curve(kernel_s: float) -> dict[int, float]:
        cluster = machines(8, kernel_s)
        costs = block_costs(*profiled(graphs, cluster), cluster)
        return {
            rows: throughput(
                asked(costs, cluster, 64 * rows, "2bw"),
                PipelineShape(width=1, depth=8, microbatch_size=rows, recompute=True),
            )
            for rows in CURVE
        }

    curves = {kernel_s: curve(kernel_s) for kernel_s in KERNEL_S}
    best = min(KERNEL_S, key=lambda s: sum(log(rate / CURVE[rows]) ** 2 for rows, rate in curves[s].items()))
    return best, {rows: round(rate, 1) for rows, rate in curves[best].items()}


def weigh(costs: BlockCosts, cluster: Cluster, batch: int, depth: int | None) -> dict[str, Any]:
    """By method the best shape; the best that recomputes; that at the paper's depth."""
    found: dict[str, Any] = {}
    for method in METHODS:
        request = asked(costs, cluster, batch, method)
        try:
            best = [one.shape for one in rank_shapes(request)]
        except InfeasibleError:
            best = []
        again = [shape for shape in best if shape.recompute]
        at_depth = [shape for shape in again if shape.depth == depth]
        kinds = zip(KINDS, (best, again, at_depth), strict=True)
        found[method] = {kind: as_row(request, several[0]) if several else None for kind, several in kinds}
    return found


def as_row(request: ShapeRequest, shape: PipelineShape) -> dict[str, Any]:
    return {
        **vars(shape),
        "microbatches": shape.microbatches(request.global_batch),
        "rows_per_s": throughput(request, shape),
        "peak_gib": memory(request, shape) / 2**30,
    }


def shapes() -> None:
    graphs = {name: {size: with_state(capture(job(name), size).graph) for size in SIZES} for name in SHAPES}
    kernel_s, curve = fitted_kernel_s(graphs["1.3B"])
    print(f"time per kernel {kernel_s * 1e6:.0f} us: {curve}", flush=True)
    rows = []
    for devices, name in ((devices, name) for devices in BATCHES for name in SHAPES):
        cluster = machines(devices, kernel_s)
        costs = block_costs(*profiled(graphs[name], cluster), cluster)
        for batch in BATCHES[devices]:
            found = weigh(costs, cluster, batch, DEPTHS.get(name))
            case = {"model": name, "devices": devices, "batch": batch}
            paper = PAPER.get((name, devices, batch), (None,) * len(METHODS))
            rows += [
                {**case, "method": method, "paper, rows per s": theirs, **found[method]}
                for method, theirs in zip(METHODS, paper, strict=True)
            ]
    print_table(rows, "Shapes")


def main() -> int:
    parts: dict[str, Callable[[], Any]] = {
        "paced": lambda: paced(given.steps, given.seconds),
        "wide": lambda: real(given.steps, given.rounds),
        "shapes": shapes,
    }
    parser = parser_of(__doc__, parts)
    parser.add_argument("--steps", type=int, default=4, help="of ranks that sleep or compute")
    parser.add_argument("--rounds", type=int, default=4, help="of ranks that compute")
    parser.add_argument("--seconds", type=float, default=0.8, help="of a micro-batch on a paced rank")
    given = parser.parse_args()
    return run_parts(given.parts, parts)


if __name__ == "__main__":
    sys.exit(main())
