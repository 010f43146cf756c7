"""Planner auto: what its search finds, how far that is from the bound, and the processor seconds it takes.

    python bench/auto.py models counts large random [--only CASE] [--first N] [--count N]

models   2: steps over the fastest of the planners for 1F1B, 16 micro-batches, by roofline
counts   1: what planning a transformer for 4 devices of 2 MiB calls, with 4 and 8 micro-batches
large    4: a chain of 12 layers on 4 devices, 10,000 ops of which 100 differ, a 70B Llama on 64, and on 512
         with width and depth chosen; captures are not counted
random   8: random graphs, clusters and three caps (`tests/support/joint_cases.py`): whether one of 24
         planners with a schedule of the library, drawn at random, is faster or has a plan alone; whether the
         step gets longer as the cap grows; the gap to the bound
"""

from __future__ import annotations

import random as dice
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from math import inf
from typing import Any
from unittest.mock import Mock, patch

import torch
from graphpipe import PUBLISHED
from machine import by_roofline, next_tokens, parser_of, print_table, run_parts, tokens
from model import Gpt
from startup import llama_70b
from torch import nn

# isort: split
from joint_cases import PLANNERS_OF_ONE, SCHEDULES, planned, random_case, step_s, with_memory
from layered import layered

from pipeloom import Job, capture, planning, shapes
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import MiB
from pipeloom.ir.graph import OpGraph
from pipeloom.plan_request import CapturedModel, PlanRequest
from pipeloom.plan_settings import PlanSettings
from pipeloom.planner.joint.search_record import searched_for
from pipeloom.planner.request import PlanOptions
from pipeloom.schedules import registry
from pipeloom.schedules.language.names import parse_name
from pipeloom.schedules.list_scheduler import choose
from pipeloom.schedules.search import library
from pipeloom.train.model import GPT

Table = list[dict[str, Any]]

SAMPLED = 24
"""Planners with a schedule that are asked about a random case."""


class Chain(nn.Module):
    """12 linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.ReLU()))
        self.layers = nn.Sequential(*layers)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layers(input).square().mean()


def chain() -> Job:
    return Job(model=Chain, batch=lambda seed, rows: {"input": torch.full((rows, 256), 0.1 * seed)})


def gpt() -> Job:
    return Job(model=partial(GPT, layers=8, width=512, heads=8, context=256), batch=tokens(256, 256))


MODELS: dict[str, tuple[Callable[[], Job], int, str]] = {
    "GPT": (gpt, 8, "4 x a100-40"),
    "case study": (PUBLISHED["case_study"], 8, "2 nodes of 4 x v100-16"),
    "MMT": (PUBLISHED["mmt"], 2, "2 nodes of 4 x v100-16"),
    "CANDLE-Uno": (PUBLISHED["candle"], 256, "1 nodes of 4 x v100-16"),
    "CLIP": (PUBLISHED["clip"], 8, "1 nodes of 4 x v100-16"),
}
"""A model, its rows and devices."""

LARGE: dict[str, tuple[Callable[[], OpGraph], int, str, int]] = {
    "12 layers": (lambda: capture(chain(), 8).graph, 8, "4 x a100-40", 16),
    "70B Llama": (lambda: capture(llama_70b(), 1).graph, 1, "8 nodes of 8 x h100", 256),
    "10,000 ops": (lambda: layered(833), 4, "2 nodes of 8 x a100-40", 64),
}
"""A graph, its rows, devices and micro-batches."""


def searched(
    name: str, graph: OpGraph, rows: int, devices: str, microbatches: int, memory: int | None = None
) -> dict[str, Any]:
    cluster = find_cluster(devices)
    if memory is not None:
        cluster = with_memory(cluster, memory)
    model = by_roofline(graph, cluster, rows)
    options = PlanOptions(ranks=len(cluster.devices), microbatches=microbatches, planner="auto")
    begin = time.process_time()
    plan = PlanRequest(cluster=cluster, options=options).plan(model, explained=False)
    took_s = time.process_time() - begin
    told = searched_for(plan)
    assert told is not None
    single = min((s for s in told["planners"].values() if not isinstance(s, str)), default=inf)
    row = {"case": name, "ops": len(graph.ops), "devices": devices, "schedule": plan.schedule}
    row |= {"step_ms": 1e3 * plan.predicted_step_s, "over_1f1b": plan.predicted_step_s / single}
    return row | {"gap": told["gap"], "processor_s": took_s}


def models(only: str | None) -> Table:
    some = {name: how for name, how in MODELS.items() if only in (None, name)}
    each = ((name, capture(job(), rows).graph, rows, where) for name, (job, rows, where) in some.items())
    return [searched(*one, 16) for one in each]


WIDE = "70B Llama, wide"


def wide() -> dict[str, Any]:
    """1,024 rows on 512 devices, as many pipelines and stages as are best."""
    capturing: list[float] = []

    def captured_model(*what: Any, **how: Any) -> CapturedModel:
        begin = time.process_time()
        model = planning.captured_model(*what, **how)
        capturing.append(time.process_time() - begin)
        return model

    devices, job = "64 nodes of 8 x h100", llama_70b()
    settings = PlanSettings(ranks=1, cluster=devices, global_batch=1024)
    request = planning.make_request(settings)
    begin = time.process_time()
    with patch.object(shapes, "captured_model", captured_model):
        found, model = shapes.plan_shape(request, job)
    took_s = time.process_time() - begin - sum(capturing)
    row = {"case": WIDE, "ops": len(model.graph.ops), "devices": devices, "schedule": found.plan.schedule}
    row |= {"width": found.shape.width, "depth": found.shape.depth, "shapes": found.simulated}
    return row | {"step_ms": 1e3 * found.plan.predicted_step_s, "processor_s": took_s}


def large(only: str | None) -> None:
    for name, (make, *how) in LARGE.items():
        if only in (None, name):
            print_table([searched(name, make(), *how)])
    if only in (None, WIDE):
        print_table([wide()])


def on_random(first: int, count: int) -> bool:
    """Whether no plan was slower than another planner's, nor than with a smaller cap, nor lacking alone."""
    as_good = True
    for seed in range(first, first + count):
        begin = time.perf_counter()
        graph, profile, cluster = random_case(seed)
        free = planned(graph, profile, cluster, "exact", "1f1b", treatments=())
        assert free is not None
        sizes = [int(share * max(free.peaks)) for share in (0.7, 0.9, 1.3)]
        made = [planned(graph, profile, with_memory(cluster, size), "auto") for size in sizes]
        steps = [step_s(plan) for plan in made]
        at = dice.Random(seed).randrange(len(sizes))
        one = with_memory(cluster, sizes[at])
        some = dice.Random(seed).sample([*product(PLANNERS_OF_ONE, SCHEDULES)], SAMPLED)
        theirs = min(step_s(planned(graph, profile, one, *how)) for how in some)
        beaten = theirs < inf and steps[at] > theirs * (1 + 1e-9)
        longer = any(b > 1.001 * a for a, b in zip(steps, steps[1:], strict=False))
        as_good = as_good and not beaten and not longer
        gaps = [told["gap"] for plan in made if plan is not None and (told := searched_for(plan))]
        row: dict[str, Any] = {"seed": seed, "steps by cap": " ".join(f"{step:.5g}" for step in steps)}
        row |= {"others' best": theirs, "is faster": beaten, "longer as a cap grew": longer}
        row |= {"gap, worst": max(gaps, default=inf), "seconds": time.perf_counter() - begin}
        print_table([row])
    return as_good


def counts(microbatches: int) -> dict[str, Any]:
    """Of one search: schedules built, scheduling problems solved, names of schedules that were read."""
    model = partial(Gpt, blocks=5, vocabulary=50, width=32, heads=4, inner=128)
    graph = capture(Job(model=model, batch=next_tokens(50, 16)), 2).graph
    build, run = Mock(wraps=registry.build), Mock(wraps=choose.run)
    parse_name.cache_clear()
    with (
        patch.object(registry, "build", build),
        patch.object(library, "build", build),
        patch.object(choose, "run", run),
    ):
        row = searched(f"{microbatches} micro-batches", graph, 2, "4 x a100-40", microbatches, 2 * MiB)
    read = parse_name.cache_info()
    row |= {"builds": build.call_count, "problems": run.call_count}
    return row | {"names": read.currsize, "names read": read.misses}


def main() -> int:
    run: dict[str, Callable[[], Table | bool | None]] = {
        "models": lambda: models(given.only),
        "counts": lambda: [counts(microbatches) for microbatches in (4, 8)],
        "large": lambda: large(given.only),
        "random": lambda: on_random(given.first, given.count),
    }
    parser = parser_of(__doc__, run)
    parser.add_argument("--only", help="one case of models or large")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random case")
    parser.add_argument("--count", type=int, default=12, help="of random cases")
    given = parser.parse_args()
    return run_parts(given.parts, run)


if __name__ == "__main__":
    sys.exit(main())
