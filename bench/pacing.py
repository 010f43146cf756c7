"""Does the simulator agree with the real runtime? Ranks that sleep for the given times instead of computing.

    python bench/pacing.py [--ranks 8] [--microbatches 16] [--rounds 3] [--seconds 0.3]

Every rank is a process with the real worker, the real program and real messages over gloo; only its stages
sleep instead of computing, so that eight ranks fit two cores. Stages take uneven times: up to 25 % more or
less than the average, and I and W differ. The simulator gets the same program, the same times, and the link
as measured between ranks 0 and 1 in the same run. A busy machine wakes sleepers late: "overslept" says by
how much, and belongs to the machine, not to the simulator.

library  schedules of the library
copies   schedules whose copies to the host sleep, too (`bench/pipeoffload.py paced`)
steady   1F1B and 2BW on four stages that take equally long (`bench/two_bw.py paced`)
plans    plans for other devices (`bench/clusters.py paced`)
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import on_ranks, parser_of, run_parts
from paced import PacedRank, PacedSteadyRank, PacedTier

from pipeloom import Plan
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph, replicate
from pipeloom.ir.steady import SteadyStep
from pipeloom.ir.text import from_json, to_json
from pipeloom.ir.weight_policies import Updates
from pipeloom.lowering.passes import lower
from pipeloom.runtime.calibrate import measure_link
from pipeloom.runtime.channel import dist_channel
from pipeloom.runtime.connect import connect, watch_ranks
from pipeloom.runtime.recorder import HostClock
from pipeloom.schedules import registry
from pipeloom.schedules.language import uplinks
from pipeloom.schedules.registry import build_steady
from pipeloom.simulator.simulate import simulate
from pipeloom.simulator.summary import Summary, summarise

NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "v_half", "dualpipev", "dualpipe")
WITH_COPIES = (("po_f", 2), ("po_h", 2), ("1f1b:offload=1", 1))
"""Schedules and the stages that each rank has."""

COPY_RATIOS = (0.5, 1.0)
KEPT_BYTES = 4096
LIMIT = 0.03
MESSAGE_BYTES = 64 * 1024
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule built for these times, or the step that repeats without a flush.

    about: what its row of the results says of it.  clips: gradients are clipped.  sum_s: seconds of each sum
    of gradients over pipelines.
    """

    about: dict[str, Any]
    schedule: Schedule | SteadyStep
    stages: StageGraph
    costs: tuple[StageCost, ...]
    clips: bool = False
    sum_s: float = 0.0


def uneven(stages: int, share_s: float) -> tuple[StageCost, ...]:
    """Uneven stages. share_s: average seconds of a stage for one micro-batch, F, I and W together."""
    found = []
    for s in range(stages):
        f = share_s * 0.30 * (1 + 0.25 * ((5 * s) % 8 - 3.5) / 3.5)
        i = share_s * 0.38 * (1 + 0.25 * ((3 * s + 2) % 8 - 3.5) / 3.5)
        w = share_s * 0.32 * (1 + 0.25 * ((7 * s + 5) % 8 - 3.5) / 3.5)
        found.append(StageCost(forward_s=f, backward_s=i + w, input_grad_s=i, weight_grad_s=w))
    return tuple(found)


def row_of(stages: int) -> StageGraph:
    return dag(stages, [(s, s + 1) for s in range(stages - 1)], value_bytes=MESSAGE_BYTES)


def built_for(costs: tuple[StageCost, ...], link: Link) -> dict[str, Any]:
    return {"costs": costs, "transfer_s": link.transfer_s(MESSAGE_BYTES)}


def library(link: Link, *, ranks: int, microbatches: int, seconds: float) -> Iterator[Case]:
    """seconds: of one micro-batch on all stages of a rank, on average."""
    for name in NAMES:
        shape, placement = registry.default_placement(name, ranks)
        count = len(placement) // shape.replicas
        stages = replicate(row_of(count), shape.replicas)
        costs = uneven(count, seconds * ranks / count) * shape.replicas
        share = microbatches // shape.replicas
        made = registry.build(name, stages, placement, share, **built_for(costs, link))
        yield Case(about={"schedule": name}, schedule=made, stages=stages, costs=costs)


def copies(link: Link, *, ranks: int, microbatches: int, seconds: float) -> Iterator[Case]:
    """seconds: of one micro-batch on a stage; a copy takes k times as long."""
    for name, chunks in WITH_COPIES:
        for k in COPY_RATIOS:
            _, placement = registry.default_placement(name, ranks, chunks)
            sized = [replace(cost, residual_bytes=KEPT_BYTES) for cost in uneven(len(placement), seconds)]
            stages, costs = row_of(len(placement)), uplinks.with_copies(sized, k)
            made = registry.build(name, stages, placement, microbatches, **built_for(costs, link))
            about = {"schedule": name, "chunks": chunks, "k": k}
            yield Case(about=about, schedule=made, stages=stages, costs=costs)


DEPTH = 4
STEADY = (("1f1b", {}), ("2bw", {}), ("2bw, clipping", {"clips": True}), ("2bw, ties", {"tied": True}))


def steady(link: Link, *, ranks: int, microbatches: int, seconds: float) -> Iterator[Case]:
    """On eight ranks two pipelines, whose sum of gradients takes half a step. seconds: of one micro-batch on
    a stage."""
    width, third, ideal_s = ranks // DEPTH, seconds / 3, microbatches * seconds
    updates = Updates(policy="2bw", every=microbatches)
    costs = equal_costs(ranks, forward_s=third, input_grad_s=third, weight_grad_s=third)
    edges = [(s, s + 1) for s in range(DEPTH - 1)]
    placement = tuple(s * width + r for r in range(width) for s in range(DEPTH))
    for name, given in STEADY if width == 1 else (("2bw, two pipelines", {"sum_s": ideal_s / 2}),):
        tied = {DEPTH - 1: ("w0",)} if given.get("tied") else {}
        params = {s: (f"w{s}",) for s in range(DEPTH)} | tied
        stages = replicate(dag(DEPTH, edges, value_bytes=MESSAGE_BYTES, params=params), width)
        made: Schedule | SteadyStep = build_steady("1f1b", stages, placement, updates)
        if name == "1f1b":
            made = registry.build("1f1b", stages, placement, microbatches)
        about = {"schedule": name, "ideal_s": ideal_s}
        how = {key: value for key, value in given.items() if key != "tied"}
        yield Case(about=about, schedule=made, stages=stages, costs=costs, **how)


def paced_plan(
    name: str, plan: Plan, edges: Iterable[tuple[int, int]], costs: Sequence[StageCost], factor: float
) -> dict[str, Any]:
    """A plan as ranks are given it. edges, costs: of its stages.  factor: of their times."""
    times = ("forward_s", "backward_s", "input_grad_s", "weight_grad_s")
    return {
        "name": name,
        "plan": to_json(plan),
        "edges": [*edges],
        "costs": [{time: factor * getattr(cost, time) for time in times} for cost in costs],
        "stretched": factor,
    }


def plans(link: Link, *, ranks: int, plans: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    """Plans of so many ranks that keep all residuals, with small messages."""
    for given in plans:
        plan = from_json(given["plan"].encode(), Plan, what="plan")
        stages = dag(len(plan.stages), map(tuple, given["edges"]), value_bytes=MESSAGE_BYTES)
        about = {
            "plan": given["name"],
            "schedule": plan.schedule,
            "parts": max(plan.split_words.values(), default=1),
            "predicted for its devices": plan.predicted_step_s * given["stretched"],
        }
        costs = tuple(StageCost(**times) for times in given["costs"])
        yield Case(about=about, schedule=plan.as_schedule, stages=stages, costs=costs)


CASES: dict[str, Callable[..., Iterator[Case]]] = {
    "library": library,
    "copies": copies,
    "steady": steady,
    "plans": plans,
}


def _busy(step: Summary) -> float:
    return sum(rank.busy_s for rank in step.ranks)


def measure(kind: str, shape: dict[str, Any], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank does: all cases of a kind, one after the other. Returns a row for each."""
    group = connect(CPU, timeout_s=120)
    rows = []
    with watch_ranks(group) as watch:
        channel = dist_channel(group, watch, device=CPU, timeout_s=120)
        link = measure_link(channel, MESSAGE_BYTES, HostClock(), CPU)
        devices = (Device(name="paced", memory_bytes=2**40),) * shape["ranks"]
        cluster = Cluster(devices=devices, within_node=link)
        for case in CASES[kind](link, **shape):
            if isinstance(case.schedule, SteadyStep):
                updates = Updates(policy="2bw", every=shape["microbatches"])
                how = {"updates": updates, "clips": case.clips}
                program = lower(case.schedule.unrolled, case.stages, **how)
                predicted_s = simulate(program, case.stages, case.costs, cluster).step_s
                parts = (case.schedule, case.stages, case.costs, channel, watch)
                measured_s = PacedSteadyRank(*parts, sum_s=case.sum_s, **how).steady_s(rounds)
                rows.append({**case.about, "predicted_s": predicted_s, "measured_s": measured_s})
                continue
            program = lower(case.schedule, case.stages)
            predicted = summarise(simulate(program, case.stages, case.costs, cluster))
            tier = PacedTier(folder, channel.rank, case.costs) if kind == "copies" else None
            rank = PacedRank(program, case.stages, case.costs, channel, watch, tier=tier)
            steps = [summarise(rank.step()) for _ in range(rounds)]
            if tier is not None:
                tier.close()
            measured_s = statistics.median(step.step_s for step in steps)
            row = case.about | {
                "predicted_s": predicted.step_s,
                "measured_s": measured_s,
                "predicted_bubble": predicted.bubble,
                "measured_bubble": statistics.median(step.bubble for step in steps),
                "overslept": statistics.median(_busy(step) for step in steps) / _busy(predicted) - 1,
            }
            rows.append(row)
    return rows


def pace(kind: str, *, rounds: int, ranks: int, **more: Any) -> list[dict[str, Any]]:
    """The figures of all cases of a kind. more: what these want, micro-batches and seconds."""
    shape = {"ranks": ranks, **more}
    with tempfile.TemporaryDirectory() as folder:
        rows: list[dict[str, Any]] = on_ranks(measure, ranks, kind, shape, rounds, Path(folder))[0]
    for row in rows:
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
    worst = max(abs(row["error"]) for row in rows)
    print(f"largest error of the step time {worst:.2%}, limit {LIMIT:.0%}")
    return rows


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a micro-batch on a rank")
    given = vars(parser.parse_args())
    return run_parts(["library"], {"library": lambda: pace("library", **given)})


if __name__ == "__main__":
    sys.exit(main())
