"""`pipeoffload` beside `dawnpiper` under a grid of caps, as simulated; lowest caps; k of a captured GPT.

Transformers of width 2048 and context 1024 (`layered.py`), 8 micro-batches of 16 rows, by roofline, with
AdamW; "cpu" is this machine's, with its disk to offload to. Caps are shares of what a rank of `1f1b` holds
where there is none.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from layered import layered
from torch import Tensor

from pipeloom import Job
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.memory_policy import Treatment
from pipeloom.ir.plan import Plan
from pipeloom.machine import with_files
from pipeloom.planner.make_plan import make_plan
from pipeloom.planner.plan_table import copy_loads, transformer_ratio
from pipeloom.planner.request import PlanOptions
from pipeloom.planning import capture
from pipeloom.profiler.roofline import roofline
from pipeloom.train.model import GPT

WIDTH, CONTEXT, ROWS, MICROBATCHES = 2048, 1024, 16, 8
VOCABULARY, SMALL_VOCABULARY = 32_000, 256
"""With the small one no logits bind."""

OFFLOAD: tuple[Treatment, ...] = ("offload",)
"""Nothing is made again, as `--treatments offload` has it."""


class CapCase(NamedTuple):
    """allowed: what may be done with residuals; None for everything.  share: of the largest cap."""

    device: str
    ranks: int
    layers: int
    vocabulary: int
    allowed: tuple[Treatment, ...] | None
    share: float


PLANNER = [
    CapCase(device, ranks, layers, VOCABULARY, None, share)
    for share in (1.0, 0.5, 0.35, 0.7, 0.4, 0.3, 0.85, 0.25)
    for device, ranks, layers in (("a100-40", 2, 2), ("h200", 2, 2), ("cpu", 2, 2), ("a100-40", 4, 8))
]
OFFLOAD_ONLY = [
    CapCase("a100-40", 2, 4, SMALL_VOCABULARY, OFFLOAD, share) for share in (0.85, 0.75, 0.65, 0.58, 0.5)
]
GRID_RANKS, GRID_LAYERS = 2, 2
GRID_CAPS: tuple[tuple[tuple[Treatment, ...] | None, tuple[float, ...]], ...] = (
    (None, (1.0, 0.75, 0.5, 0.44)),
    (OFFLOAD, (0.9, 0.7, 0.6)),
)
"""What may be done with residuals, and caps; the last of each are below what `dawnpiper` needs on an A100."""

GRID = [
    CapCase(device, GRID_RANKS, GRID_LAYERS, SMALL_VOCABULARY, allowed, share)
    for allowed, shares in GRID_CAPS
    for share in shares
    for device in ("a100-40", "h200", "cpu")
]
MOST_S = 540.0
"""No cap is begun after so many seconds."""

BISECTED = ("a100-40", "cpu")
BISECTED_PLANNERS = (("dawnpiper", "1f1b"), ("dawnpiper", "gis_h"), ("pipeoffload", "1f1b"))
LEAST, CLOSE = 0.3, 0.02
"""Share of the largest cap from which on the lowest is sought, none having a plan below, and how closely."""


def gpt(layers: int, width: int, heads: int, context: int) -> Job:
    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        ids = torch.randint(256, (rows, context), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    def model() -> torch.nn.Module:
        return GPT(layers=layers, width=width, heads=heads, context=context)

    return Job(model=model, batch=batch, name="GPT")


@cache
def cluster_of(device: str, ranks: int) -> Cluster:
    """The CPU's with this machine's disk, as fast as it is found to be."""
    if device != "cpu":
        return find_cluster(f"{ranks} x {device}")
    with tempfile.TemporaryDirectory() as folder:
        return with_files(cpu_cluster(ranks), Path(folder))[0]


def planned(
    graph: OpGraph,
    cluster: Cluster,
    planner: str,
    schedule: str,
    cap: float | None,
    treatments: tuple[Treatment, ...] | None = None,
    *,
    fastest: bool = True,
) -> Plan | None:
    """None if nothing fits. fastest: if not, the first that does will do."""
    if cap is not None:
        devices = tuple(replace(each, memory_bytes=int(cap)) for each in cluster.devices)
        cluster = replace(cluster, devices=devices)
    try:
        return make_plan(
            graph,
            roofline(graph, cluster.devices[0]),
            cluster,
            ranks=len(cluster.devices),
            schedule=schedule,
            microbatches=MICROBATCHES,
            planner=planner,
            options=PlanOptions(treatments=treatments, fastest=fastest),
            explained=False,
        )
    except InfeasibleError:
        return None


def under_caps(cases: Sequence[CapCase]) -> list[dict[str, Any]]:
    """The steps of `pipeoffload` and of `dawnpiper` in seconds, and how long they were sought, as far as
    there is time; prints where it is slower, and where it alone has a plan."""
    rows = []
    begin = time.perf_counter()
    for case in cases:
        if time.perf_counter() - begin > MOST_S:
            break
        rows.append(case._asdict() | beside(case))
    slower = [
        row
        for row in rows
        for name in ("1f1b", "gis_h")
        if row[name] and (not row["pipeoffload"] or row["pipeoffload"] > row[name] * (1 + 1e-9))
    ]
    only = [row for row in rows if row["pipeoffload"] and not row["1f1b"] and not row["gis_h"]]
    print(
        f"slower than dawnpiper at {len(slower)} of {len(rows)} caps, alone fits at {len(only)}; "
        f"{len(cases) - len(rows)} caps left out"
    )
    return rows


def beside(case: CapCase) -> dict[str, Any]:
    cluster = cluster_of(case.device, case.ranks)
    graph = layered(case.layers, hidden=WIDTH, length=CONTEXT, rows=ROWS, vocabulary=case.vocabulary)
    free = planned(graph, cluster, "exact", "1f1b", None)
    assert free is not None
    cap = case.share * max(free.peaks)
    begin = time.perf_counter()
    ours = planned(graph, cluster, "pipeoffload", "1f1b", cap, case.allowed)
    row: dict[str, Any] = {"cap": int(cap), "search_s": time.perf_counter() - begin}
    row |= {"pipeoffload": ours and ours.predicted_step_s, "schedule": ours and ours.schedule}
    begin = time.perf_counter()
    for schedule in ("1f1b", "gis_h"):
        other = planned(graph, cluster, "dawnpiper", schedule, cap, case.allowed)
        row[schedule] = other and other.predicted_step_s
    return row | {"dawnpiper_s": time.perf_counter() - begin}


def planner(quick: bool) -> list[dict[str, Any]]:
    return under_caps(PLANNER[:1] if quick else PLANNER)


def offload_only(quick: bool) -> list[dict[str, Any]]:
    return under_caps(OFFLOAD_ONLY[-1:] if quick else OFFLOAD_ONLY)


def grid(quick: bool) -> list[dict[str, Any]]:
    return under_caps(GRID[-1:] if quick else GRID)


def ratio(quick: bool) -> list[dict[str, Any]]:
    """k of captured GPTs by roofline, in the middle of a pipeline, beside the formula."""
    rows = []
    for width, context in (
        ((256, 256),) if quick else ((1024, 1024), (2048, 1024), (2048, 2048), (4096, 1024))
    ):
        graph = capture(gpt(6, width, width // 64, context), 1).graph
        for device in ("a100-80", "h200"):
            cluster = find_cluster(f"3 x {device}")
            one = cluster.devices[0]
            plan = planned_alone(graph, cluster)
            load = copy_loads(plan, cluster)[1]
            assert load is not None and one.host_link is not None
            rate = one.flops_per_s["float32"] * one.efficiency["matmul"]
            formula = transformer_ratio(
                width, context, flops_per_s=rate, host_bytes_per_s=one.host_link.bandwidth_bytes_per_s
            )
            row = {"device": device, "hidden": width, "context": context, "k": load.ratio, "formula": formula}
            rows.append(row | {"utilisation": load.utilisation, "offloadable": load.offloadable})
    return rows


def planned_alone(graph: OpGraph, cluster: Cluster) -> Plan:
    """Three stages without a cap."""
    devices = tuple(replace(each, memory_bytes=1 << 50) for each in cluster.devices)
    return make_plan(
        graph,
        roofline(graph, cluster.devices[0]),
        replace(cluster, devices=devices),
        ranks=3,
        schedule="1f1b",
        microbatches=6,
        planner="exact",
        options=PlanOptions(treatments=()),
    )


def lowest(quick: bool) -> list[dict[str, Any]]:
    """The lowest cap of each planner, for both that may be done with residuals."""
    graph = layered(GRID_LAYERS, hidden=WIDTH, length=CONTEXT, rows=ROWS, vocabulary=SMALL_VOCABULARY)
    rows = []
    for device in BISECTED[:1] if quick else BISECTED:
        cluster = cluster_of(device, GRID_RANKS)
        free = planned(graph, cluster, "exact", "1f1b", None)
        assert free is not None
        whole = max(free.peaks)
        for allowed, _ in GRID_CAPS:
            for planner, schedule in BISECTED_PLANNERS[:1] if quick else BISECTED_PLANNERS:
                low, high, name = LEAST, 1.0, None
                while high - low > CLOSE:
                    share = (low + high) / 2
                    plan = planned(graph, cluster, planner, schedule, share * whole, allowed, fastest=False)
                    low, high = (share, high) if plan is None else (low, share)
                    name = name if plan is None else plan.schedule
                row = {"device": device, "allowed": allowed, "planner": f"{planner}, {schedule}"}
                rows.append(row | {"share": high, "bytes": int(high * whole), "schedule": name})
    return rows
