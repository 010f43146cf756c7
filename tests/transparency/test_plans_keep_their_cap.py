"""Random models planned under random caps: the plan fits as simulated, and when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import runs
import torch
import zoo
from hypothesis import HealthCheck, Phase, event, given, strategies as st
from torch import Tensor, nn
from trials import examples

from pipeloom import Job, Pipeline, Plan, plan
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.planner.planners import PLANNERS, OneSchedule

WIDTH, ROWS, MICROBATCHES = 16, 64, 6
KINDS = ("linear", "gelu", "tanh", "norm", "skip", "older", "attention", "heads", "halves", "dropout")
FREEING = [
    name
    for name, planner in PLANNERS.items()
    if planner.optimises != "never" and isinstance(planner.plan, OneSchedule)
]


class Layers(nn.Module):
    """Layers in a row, each drawn. Shapes: x and y (rows, width)."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.kinds = tuple(kinds)
        self.own = nn.ModuleList(
            nn.LayerNorm(WIDTH) if kind == "norm" else nn.Linear(WIDTH, WIDTH) for kind in kinds
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = [x]
        for kind, layer in zip(self.kinds, self.own, strict=True):
            values.append(self.value(kind, layer, values))
        return (values[-1] * y).mean()

    def value(self, kind: str, layer: nn.Module, values: list[Tensor]) -> Tensor:
        x = values[-1]
        match kind:
            case "gelu":
                return nn.functional.gelu(layer(x))
            case "tanh":
                return torch.tanh(layer(x))
            case "skip":
                return x + layer(x)
            case "older":  # from far back, over any number of stages
                return layer(x) + values[len(values) // 2]
            case "attention":
                return (x @ layer(x).t()).softmax(-1) @ x
            case "heads":  # transposed, and back by a reshape
                rows = layer(x).view(len(x), 2, WIDTH // 2).transpose(0, 1)
                mixed = (rows @ rows.transpose(1, 2)).softmax(-1) @ rows
                return mixed.transpose(0, 1).reshape(x.shape)
            case "halves":  # parts of a storage, as rotary embeddings make them
                first, second = layer(x).chunk(2, dim=1)
                return torch.cat([-second, first], dim=1) * x
            case "dropout":
                return nn.functional.dropout(layer(x), 0.2, self.training)
            case _:
                return layer(x)


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, WIDTH, generator=g) for name in "xy"}


def cluster_of(stages: int, cap: int | None) -> Cluster:
    """Processors with a disk to offload to."""
    ranks = cpu_cluster(stages, memory=cap)
    disk = Link(bandwidth_bytes_per_s=1e9)
    return replace(
        ranks, devices=tuple(replace(d, host_link=disk, host_memory_bytes=1 << 30) for d in ranks.devices)
    )


def run(job: Job, made: Plan, folder: Path) -> list[int]:
    """Two steps under the plan's caps; the peak of each rank in bytes."""

    def work(pipeline: Pipeline) -> int:
        for seed in range(2):
            pipeline.step(job.batch(seed, MICROBATCHES * ROWS))
        return pipeline.ledger.peak

    return runs.each_rank(job, made, work, offload_dir=folder)


CASES = st.builds(
    dict,
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=12),
    ranks=st.integers(1, 3),
    share=st.floats(0.3, 1.0),  # of what the fullest device needs with everything kept
    planner=st.sampled_from(FREEING),
    treatments=st.sampled_from([("recompute",), ("offload",), ("recompute", "offload")]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
HOW = {
    "phases": [Phase.reuse, Phase.generate],
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@examples(2, 60, **HOW)
@given(case=CASES)
def test_a_plan_fits_its_cap_when_it_runs(tmp_path: Path, case: dict[str, Any]) -> None:
    kinds, ranks, share, schedule = (case[name] for name in ("kinds", "ranks", "share", "schedule"))
    treated = {name: case[name] for name in ("planner", "treatments")}
    job = Job(model=partial(Layers, kinds), batch=batch, optimizer=zoo.sgd)
    how = {"ranks": ranks, "microbatches": MICROBATCHES, "microbatch_size": ROWS, "schedule": schedule}
    how["captured"] = runs.capture_of(job, ROWS)
    free = plan(job, **how, cluster=cluster_of(ranks, 1 << 30))
    cap = int(share * max(free.peaks))
    try:
        made = plan(job, **how, cluster=cluster_of(ranks, cap), **treated)
    except InfeasibleError:
        event("nothing fits")
        return
    event(f"{treated['planner']}, {'treated' if any(made.memory.stages) else 'kept'}")
    assert max(made.peaks) <= cap and made.caps == (cap,) * ranks
    assert max(run(job, made, tmp_path)) <= cap
