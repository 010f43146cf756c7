"""DawnPiper (arXiv 2505.05856): the largest micro-batches that planners find a plan for.

    python bench/dawnpiper.py --models bert --minutes 9

BERT-large, GPT-2 1.5B, T5-3B and AmoebaNet-D (18, 256) in float32 with AdamW on 4 and 8 x A100-40GB, by
roofline; 4 micro-batches per device and step. Updates after a flush (1f1b) or with stashed weights
(async_1f1b). Caps: what an A100 has; and, tight and for 4 devices, 1.0 and 1.3 times the least with which
pipedream trains one row. Models are captured at two sizes and interpolated. All cells take hours on two
cores: choose with --models and --devices; no cell is begun after --minutes.

The language models are Hugging Face's, without dropout; attention is one kernel, of T5 single ops.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers as hf
from machine import FREE, by_roofline, changed, parser_of, print_table, run_parts, tokens
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job, capture
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.plan import Plan
from pipeloom.ir.text import format_bytes
from pipeloom.plan_request import LARGEST_MICROBATCH, PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel, interpolate_sample, largest_size
from pipeloom.planner.request import PlanOptions
from pipeloom.planning import ModelAt

# --- AmoebaNet-D, whose cells are small graphs: cuts of it carry several values -----------------------
#
# Source of the cells: Real et al. 2018 (arXiv 1802.01548), figure 5, with the output states of the normal
# cell as in the authors' public implementation. The numbers of parameters are those of table 1 of GPipe
# (arXiv 1811.06965) to 1 %: 82, 318 and 542 million for 18 layers and 208, 416 and 544 filters.
# Shapes: B batch, C channels, H height, W width.


class Step(NamedTuple):
    """One input of a pairwise sum: which state it reads, and the op that it passes it through."""

    state: int
    op: str


class Kind(NamedTuple):
    """A kind of cell. States 0 and 1 are the previous cell's and the one before; each further one is the sum
    of two steps. outputs: the states that are joined."""

    sums: tuple[tuple[Step, Step], ...]
    outputs: tuple[int, ...]


NORMAL = Kind(
    sums=(
        (Step(1, "conv_1x1"), Step(1, "max_3x3")),
        (Step(1, "identity"), Step(0, "conv_1x7_7x1")),
        (Step(0, "conv_1x1"), Step(0, "conv_1x7_7x1")),
        (Step(2, "max_3x3"), Step(2, "identity")),
        (Step(1, "avg_3x3"), Step(5, "conv_1x1")),
    ),
    outputs=(0, 3, 4, 6),
)
REDUCTION = Kind(
    sums=(
        (Step(0, "max_2x2"), Step(0, "max_3x3")),
        (Step(2, "identity"), Step(1, "conv_3x3")),
        (Step(2, "conv_1x7_7x1"), Step(2, "max_3x3")),
        (Step(3, "identity"), Step(1, "max_2x2")),
        (Step(2, "avg_3x3"), Step(3, "conv_1x1")),
    ),
    outputs=(4, 5, 6),
)


def conv(inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: int = 1) -> nn.Sequential:
    """ReLU, convolution, normalisation; keeps height and width at stride 1."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs)
    )


def through_quarter(channels: int, stride: int, *kernels: tuple[int, int]) -> nn.Sequential:
    """Convolutions on a quarter of the channels; of several, each has the stride along its length."""
    quarter = channels // 4
    steps = [conv(channels, quarter)]
    for kernel in kernels:
        steps.append(conv(quarter, quarter, kernel, stride))
        if len(kernels) > 1 and stride > 1:
            along = (stride, 1) if kernel[0] > 1 else (1, stride)
            padding = (kernel[0] // 2, kernel[1] // 2)
            steps[-1][1] = nn.Conv2d(quarter, quarter, kernel, along, padding, bias=False)
    return nn.Sequential(*steps, conv(quarter, channels))


class Halved(nn.Module):
    """Half the height and width by two convolutions, of which one looks at the pixels between the other's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = fn.relu(x_BCHW)
        shifted = fn.pad(x_BCHW, (0, 1, 0, 1))[:, :, 1:, 1:]
        joined: Tensor = self.norm(torch.cat([self.even(x_BCHW), self.odd(shifted)], dim=1))
        return joined


OPS: dict[str, Callable[[int, int], nn.Module]] = {
    "identity": lambda channels, stride: nn.Identity() if stride == 1 else Halved(channels, channels),
    "max_2x2": lambda channels, stride: nn.MaxPool2d(2, stride=stride),
    "max_3x3": lambda channels, stride: nn.MaxPool2d(3, stride=stride, padding=1),
    "avg_3x3": lambda channels, stride: nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False),
    "conv_1x1": lambda channels, stride: conv(channels, channels, stride=stride),
    "conv_3x3": lambda channels, stride: through_quarter(channels, stride, (3, 3)),
    "conv_1x7_7x1": lambda channels, stride: through_quarter(channels, stride, (1, 7), (7, 1)),
}
"""By name: (channels, stride) -> module."""


class AmoebaCell(nn.Module):
    """before, previous: channels of the two cells in front.  halve: the cell in front has halved the size."""

    def __init__(self, before: int, previous: int, channels: int, kind: Kind, *, halve: bool) -> None:
        super().__init__()
        self.kind = kind
        self.from_previous = conv(previous, channels)
        self.from_before: nn.Module = nn.Identity()
        if halve:
            self.from_before = Halved(before, channels)
        elif before != channels:
            self.from_before = conv(before, channels)
        stride = 2 if kind is REDUCTION else 1
        self.steps = nn.ModuleList(
            OPS[step.op](channels, stride if step.state < 2 else 1) for pair in kind.sums for step in pair
        )

    def forward(self, before: Tensor, previous: Tensor) -> Tensor:
        states = [self.from_previous(previous), self.from_before(before)]
        for index, (first, second) in enumerate(self.kind.sums):
            one, other = self.steps[2 * index], self.steps[2 * index + 1]
            states.append(one(states[first.state]) + other(states[second.state]))
        return torch.cat([states[state] for state in self.kind.outputs], dim=1)


class AmoebaNetD(nn.Module):
    """layers: normal cells, in three groups.  filters: four times the channels of the stem."""

    def __init__(self, layers: int, filters: int, classes: int = 1000) -> None:
        super().__init__()
        channels = filters // 4
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels))
        before = previous = channels
        halve = False
        cells = []
        kinds = [REDUCTION, REDUCTION, *([NORMAL] * (layers // 3) + [REDUCTION]) * 3]
        for kind in kinds[:-1]:
            channels *= 2 if kind is REDUCTION else 1
            cells.append(AmoebaCell(before, previous, channels, kind, halve=halve))
            before, previous = previous, channels * len(kind.outputs)
            halve = kind is REDUCTION
        self.cells = nn.ModuleList(cells)
        self.classify = nn.Linear(previous, classes)

    def forward(self, x_BCHW: Tensor, labels: Tensor) -> dict[str, Tensor]:
        before = previous = self.stem(x_BCHW)
        for cell in self.cells:
            before, previous = previous, cell(before, previous)
        scores = self.classify(previous.mean(dim=(2, 3)))
        return {"loss": fn.cross_entropy(scores, labels)}


def amoeba(layers: int, filters: int, pixels: int, classes: int = 1000) -> Job:
    """AmoebaNet-D on made-up images."""

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "x_BCHW": torch.randn(rows, 3, pixels, pixels, generator=generator),
            "labels": torch.randint(classes, (rows,), generator=generator),
        }

    name = f"AmoebaNet-D ({layers}, {filters})"
    return Job(model=lambda: AmoebaNetD(layers, filters, classes), batch=batch, name=name)


# --- language models ------------------------------------------------------------------------------


def language_model(name: str, kind: type[nn.Module], config: Any, length: int) -> Job:
    return Job(model=lambda: kind(config), batch=tokens(config.vocab_size, length), name=name)


def bert() -> Job:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.BertConfig(**sizes, **dropout, num_attention_heads=16)
    return language_model("BERT-large", hf.BertForMaskedLM, config, 512)


def gpt2() -> Job:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
    config = hf.GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False, **ends, **dropout)
    return language_model("GPT-2 1.5B", hf.GPT2LMHeadModel, config, 1024)


def t5() -> Job:
    sizes = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32}
    ends = {"tie_word_embeddings": False, "decoder_start_token_id": 0}
    config = hf.T5Config(dropout_rate=0.0, use_cache=False, **sizes, **ends)
    return language_model("T5-3B", hf.T5ForConditionalGeneration, config, 512)


REAL: Mapping[str, Callable[[], Job]] = {
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
    "amoebanet": lambda: amoeba(18, 256, 224),
}
"""At published sizes: arXiv 1810.04805, Radford et al. 2019, arXiv 1910.10683 and 1811.06965."""

# --- planners against each other ------------------------------------------------------------------
# A cell is one model on one cluster under one cap with one way of updating weights; it has a row per planner:
# {"batch": largest micro-batch, 0 if none fits, "samples_per_s": at it, "at": {size: samples per second}}

Cell: TypeAlias = Mapping[str, Any]
Ratio: TypeAlias = Callable[[Cell], float | None]
"""None where a planner that is compared has no plan."""

PLANNERS = ("pipedream", "vpipe", "dawnpiper", "probe")
PER_DEVICE = 4
"""Micro-batches of a step for each device."""

CAPTURED = (2, 4)
"""Rows at which models are captured. Of one row, shapes need not follow those of several."""

SCHEDULES = {"flush": "1f1b", "stash": "async_1f1b"}
DEVICES, TIGHT, FULL = (4, 8), (1.0, 1.3), "A100-40GB"


def batch_ratio(ours: str, theirs: str) -> Ratio:
    """How many times larger one planner's largest micro-batch is than another's."""

    def ratio(cell: Cell) -> float | None:
        first, second = (cell["planners"][name]["batch"] for name in (ours, theirs))
        return first / second if first and second else None

    return ratio


def speed_ratio(ours: str, theirs: str, *, everyone: bool = False) -> Ratio:
    """How many times faster a planner's plan is at the largest size that both, or all, have a plan for."""

    def ratio(cell: Cell) -> float | None:
        size = common_size(cell, cell["planners"] if everyone else (ours, theirs))
        if not size:
            return None
        first, second = (cell["planners"][name]["at"][str(size)] for name in (ours, theirs))
        return float(first / second) if first and second else None

    return ratio


def common_size(cell: Cell, planners: Iterable[str]) -> int:
    """The largest micro-batch that all of these planners have a plan for; 0 if one has none."""
    return min(int(cell["planners"][name]["batch"]) for name in planners)


RATIOS: dict[str, Ratio] = {
    "batch, dawnpiper / vpipe": batch_ratio("dawnpiper", "vpipe"),  # the paper: up to 4
    "batch, dawnpiper / pipedream": batch_ratio("dawnpiper", "pipedream"),  # the paper: up to 11
    "batch, probe / dawnpiper": batch_ratio("probe", "dawnpiper"),
    "speed, dawnpiper / vpipe": speed_ratio("dawnpiper", "vpipe"),  # the paper: up to 1.5
    "speed, dawnpiper / vpipe, at everyone's size": speed_ratio("dawnpiper", "vpipe", everyone=True),
    "speed, probe / dawnpiper": speed_ratio("probe", "dawnpiper"),
}


def compared(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Of each ratio, over all cells and over groups of them: the best, the geometric mean and the least."""
    groups: dict[str, list[Cell]] = {"all": list(cells)}
    for cell in cells:
        for key in (f"weights {cell['weights']}", f"cap {cell['cap']}", f"model {cell['model']}"):
            groups.setdefault(key, []).append(cell)
    for group, members in groups.items():
        for name, ratio in RATIOS.items():
            found = [(value, cell["name"]) for cell in members if (value := ratio(cell)) is not None]
            if found:
                mean = geometric_mean([value for value, _ in found])
                figures = {"best": max(found), "mean": mean, "least": min(found), "cells": len(found)}
                yield {"cells of": group, "ratio": name, **figures}


# --- simulated ------------------------------------------------------------------------------------


def keys(devices: Sequence[int]) -> list[tuple[int, str, str]]:
    """(devices, weights, cap) of a model's cells, the most important first. Tight caps on 4 devices only."""
    full = [(count, weights, FULL) for count in devices for weights in SCHEDULES]
    tight = [(DEVICES[0], weights, f"x{factor}") for weights in SCHEDULES for factor in TIGHT]
    return full + (tight if DEVICES[0] in devices else [])


def samples(ends: Sequence[ProfiledModel], cluster: Cluster) -> ModelAt:
    """Size -> the model at it: shapes by interpolation, costs by roofline."""

    @lru_cache(maxsize=64)
    def take(size: int) -> ProfiledModel:
        return by_roofline(interpolate_sample(*ends, size).graph, cluster, size)

    return take


def planning(cluster: Cluster, weights: str, planner: str) -> PlanRequest:
    count = len(cluster.devices)
    options = PlanOptions(
        ranks=count, microbatches=PER_DEVICE * count, schedule=SCHEDULES[weights], planner=planner
    )
    return PlanRequest(cluster=cluster, options=options)


def planned(how: PlanRequest, take: ModelAt, size: int) -> Plan | None:
    """The plan for micro-batches of `size` rows, None if none fits."""
    try:
        return how.plan(take(size), explained=False)
    except InfeasibleError:
        return None


def planned_freely(cluster: Cluster, planner: str, weights: str, take: ModelAt, size: int) -> Plan:
    plan = planned(planning(changed(cluster, memory_bytes=FREE), weights, planner), take, size)
    assert plan is not None, "under a cap of a pebibyte everything fits"
    return plan


def least_cap(cluster: Cluster, weights: str, planner: str, take: ModelAt, rows: int = 1) -> int:
    """The smallest cap, to a thousandth, with which a planner that only looks at caps afterwards has a plan
    for micro-batches of `rows` rows."""
    cap = max(stage.memory.total for stage in planned_freely(cluster, planner, weights, take, rows).stages)
    while planned(planning(changed(cluster, memory_bytes=cap), weights, planner), take, rows) is None:
        cap = ceil(cap * 1.001)
    return cap


def samples_per_s(plan: Plan) -> float:
    return plan.microbatches * plan.microbatch_size / plan.predicted_step_s


def compare_planners(cluster: Cluster, weights: str, take: ModelAt) -> dict[str, Any]:
    """Every planner's largest micro-batch, and its speed at that size and at those of the others. A smaller
    size than the largest may have no plan, as searches are not exact; it is then in no ratio."""
    rows: dict[str, dict[str, Any]] = {}
    start = 1
    for planner in PLANNERS:
        how = planning(cluster, weights, planner)
        sizes = range(1, LARGEST_MICROBATCH + 1)
        size = largest_size(sizes, lambda size, how=how: how.fits(take(size)), start=start - 1)
        plan = None if size is None else planned(how, take, size)
        rows[planner] = {"batch": 0, "at": {}}
        if plan is not None:
            speed, start = samples_per_s(plan), plan.microbatch_size
            rows[planner] = {"batch": start, "samples_per_s": speed, "at": {str(start): speed}}
    cell = {"weights": weights, "planners": rows}
    for names in (PLANNERS, ("dawnpiper", "vpipe"), ("probe", "dawnpiper")):
        size = common_size(cell, names)
        for planner in names if size else ():
            if str(size) not in rows[planner]["at"]:
                plan = planned(planning(cluster, weights, planner), take, size)
                rows[planner]["at"][str(size)] = samples_per_s(plan) if plan else 0.0
    return cell


def one_cell(model: str, count: int, weights: str, cap: str, file: Path, until: float) -> Cell | None:
    """A cell; None if it is later than `until`."""
    if time.time() > until:
        return None
    cluster = find_cluster(f"{count} x a100-40")
    take = samples(pickle.loads(file.read_bytes()), cluster)
    size = cluster.devices[0].memory_bytes
    if cap != FULL:
        size = ceil(float(cap.removeprefix("x")) * least_cap(cluster, weights, "pipedream", take))
    name = f"{model}, {count} devices, {weights}, {cap} ({format_bytes(size)})"
    known = {"name": name, "model": model, "devices": count, "cap": cap}
    return known | compare_planners(changed(cluster, memory_bytes=size), weights, take)


def captured(model: str, file: Path) -> dict[str, Any]:
    """Capture a model at two sizes, for the cells. Returns what it is."""
    begin, job = time.process_time(), REAL[model]()
    ends = [ProfiledModel(size=n, graph=capture(job, n).graph, profiles={}) for n in CAPTURED]
    file.write_bytes(pickle.dumps(ends))
    graph = ends[0].graph
    parameters = sum(p.bytes for p in graph.parameters) // 4
    took = {"capture_cpu_s": time.process_time() - begin}
    return {"model": job.name, "ops": len(graph.ops), "parameters": parameters, **took}


def simulate_all(models: list[str], devices: list[int], jobs: int, minutes: float) -> None:
    """All cells, some at a time, each in a process of its own; none begins after so many minutes."""
    until = time.time() + 60 * minutes
    pool_of = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as folder, pool_of as pool:
        files = {model: Path(folder) / model for model in models}
        print_table(list(pool.map(captured, models, files.values())), "Models")
        asked = [(model, *key) for key in keys(devices) for model in models]
        begun = [pool.submit(one_cell, *key, files[key[0]], until) for key in asked]
        cells = []
        for each in begun:
            if (made := each.result()) is not None:
                cells.append(made)
                sizes = {planner: row["batch"] for planner, row in made["planners"].items()}
                print(f"{made['name']}: {sizes}, all at {common_size(made, PLANNERS)}", flush=True)
        print(f"{len(cells)} of {len(begun)} cells")
    print_table(list(compared(cells)), "Planners against each other")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=[*REAL], choices=[*REAL])
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES))
    parser.add_argument("--jobs", type=int, default=2, help="cells simulated at the same time")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no cell after that time")
    given = parser.parse_args()
    part = partial(simulate_all, given.models, given.devices, given.jobs, given.minutes)
    return run_parts(["simulated"], {"simulated": part})


if __name__ == "__main__":
    sys.exit(main())
