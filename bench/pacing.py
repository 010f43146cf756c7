"""Does the simulator agree with the real runtime? Ranks that sleep for the given times instead of computing.

    python bench/pacing.py [--ranks 8] [--microbatches 16] [--rounds 3] [--seconds 0.3]
    python bench/pacing.py --graph [--towers 3] [--microbatches 12] [--rounds 3] [--seconds 0.2]

Every rank is a process with the real worker, the real program and real messages over gloo; only its stages
sleep instead of computing, so that eight ranks fit two cores. Stages take uneven times: up to 25 % more or
less than the average, and I and W differ. The simulator gets the same program, the same times, and the link
as measured between ranks 0 and 1 in the same run. A busy machine wakes sleepers late: "overslept" says by
how much, and belongs to the machine, not to the simulator.

library  schedules of the library
graph    towers of two stages each and a join, one stage per process. `dag` has the edges of the data; in
         `chain` every stage also waits for the one in front of it, as where values are handed on
copies   schedules whose copies to the host sleep, too (`bench/pipeoffload.py paced`)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import print_stamp, print_table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from paced import PacedRank, PacedTier  # noqa: E402

from pipeloom.ir.cluster import Cluster, Device, Link  # noqa: E402
from pipeloom.ir.costs import StageCost  # noqa: E402
from pipeloom.ir.flow import dag  # noqa: E402
from pipeloom.ir.schedule import Schedule  # noqa: E402
from pipeloom.ir.stages import StageGraph, replicate  # noqa: E402
from pipeloom.lowering.passes import lower  # noqa: E402
from pipeloom.runtime.calibration.link import measure_link  # noqa: E402
from pipeloom.runtime.launch.connect import connect, watch_ranks  # noqa: E402
from pipeloom.runtime.launch.launch import launch  # noqa: E402
from pipeloom.runtime.recorder import HostClock  # noqa: E402
from pipeloom.runtime.transports.dist_channel import DistChannel  # noqa: E402
from pipeloom.schedules import registry  # noqa: E402
from pipeloom.schedules.language import uplinks  # noqa: E402
from pipeloom.simulator.simulate import simulate  # noqa: E402
from pipeloom.simulator.summary import Summary, summarise  # noqa: E402

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
    """A schedule built for these times. about: what its row of the results says of it."""

    about: dict[str, Any]
    schedule: Schedule
    stages: StageGraph
    costs: tuple[StageCost, ...]


def uneven(stages: int, share_s: float) -> tuple[StageCost, ...]:
    """Uneven stages. share_s: average seconds of a stage for one micro-batch, F, I and W together."""
    found = []
    for s in range(stages):
        forward = share_s * 0.30 * (1 + 0.25 * ((5 * s) % 8 - 3.5) / 3.5)
        backward = share_s * 0.38 * (1 + 0.25 * ((3 * s + 2) % 8 - 3.5) / 3.5)
        weight = share_s * 0.32 * (1 + 0.25 * ((7 * s + 5) % 8 - 3.5) / 3.5)
        found.append(
            StageCost(
                forward_s=forward, backward_s=backward + weight, input_grad_s=backward, weight_grad_s=weight
            )
        )
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


def graph(link: Link, *, ranks: int, microbatches: int, seconds: float) -> Iterator[Case]:
    """Towers side by side, and the same with every stage behind the one in front of it."""
    join, costs = ranks - 1, uneven(ranks, seconds)
    edges = {(s, s + 1) for s in range(0, join, 2)} | {(s, join) for s in range(1, join, 2)}
    shapes = {"dag": edges, "chain": edges | {(s, s + 1) for s in range(join)}}
    for name in ("1f1b", "zb_h1"):
        for shape, wires in shapes.items():
            stages = dag(ranks, sorted(wires), value_bytes=MESSAGE_BYTES)
            times = built_for(costs, link)
            made = registry.build(name, stages, tuple(range(ranks)), microbatches, **times)
            about = {"schedule": name, "shape": shape, "in_flight": max(registry.in_flight(made))}
            yield Case(about=about, schedule=made, stages=stages, costs=costs)


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


CASES: dict[str, Callable[..., Iterator[Case]]] = {"library": library, "graph": graph, "copies": copies}


def _busy(step: Summary) -> float:
    return sum(rank.busy_s for rank in step.ranks)


def rank_main(kind: str, shape: dict[str, Any], rounds: int, folder: Path) -> None:
    """What each rank does: all cases of a kind, one after the other. Rank 0 writes the rows."""
    torch.set_num_threads(1)
    group = connect(CPU, timeout_s=120)
    with watch_ranks(group) as watch:
        channel = DistChannel(group, watch, device=CPU, timeout_s=120)
        link = measure_link(channel, MESSAGE_BYTES, HostClock(), CPU)
        devices = (Device(name="paced", memory_bytes=2**40),) * shape["ranks"]
        cluster, rows = Cluster(devices=devices, within_node=link), []
        for case in CASES[kind](link, **shape):
            program = lower(case.schedule, case.stages)
            predicted = summarise(simulate(program, case.stages, case.costs, cluster))
            tier = PacedTier(folder / "away", channel.rank, case.costs) if kind == "copies" else None
            rank = PacedRank(program, case.stages, case.costs, channel, watch, tier=tier)
            steps = [summarise(rank.step()) for _ in range(rounds)]
            if tier is not None:
                tier.close()
            measured_s = statistics.median(step.step_s for step in steps)
            row = {
                **case.about,
                "predicted_s": predicted.step_s,
                "measured_s": measured_s,
                "error": predicted.step_s / measured_s - 1,
                "predicted_bubble": predicted.bubble,
                "measured_bubble": statistics.median(step.bubble for step in steps),
                "overslept": statistics.median(_busy(step) for step in steps) / _busy(predicted) - 1,
            }
            rows.append(row)
            if dist.get_rank() == 0:
                named = ", ".join(f"{key} {value}" for key, value in case.about.items())
                print(
                    f"{named}: predicted {predicted.step_s:.3f} s, measured {measured_s:.3f} s "
                    f"({row['error']:+.2%}); bubble {predicted.bubble:.1%}, measured "
                    f"{row['measured_bubble']:.1%}; actions took {row['overslept']:.2%} longer than asked",
                    flush=True,
                )
        if dist.get_rank() == 0:
            about = {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
            (folder / "rows.json").write_text(json.dumps({"link": about, "rows": rows}))


def pace(kind: str, *, ranks: int, microbatches: int, seconds: float, rounds: int) -> dict[str, Any]:
    """The figures of all cases of a kind. Raises: SystemExit if a rank fails."""
    shape = {"ranks": ranks, "microbatches": microbatches, "seconds": seconds}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if launch(rank_main, ranks, args=(kind, shape, rounds, folder)) != 0:
            raise SystemExit("paced ranks failed")
        found = json.loads((folder / "rows.json").read_text())
    worst = max(abs(row["error"]) for row in found["rows"])
    print(f"largest error of the step time {worst:.2%}, limit {LIMIT:.0%}")
    return {**shape, "worst": worst, "limit": LIMIT, **found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graph", action="store_true", help="towers side by side instead of the library")
    parser.add_argument("--ranks", type=int, default=8, help="for the library")
    parser.add_argument("--towers", type=int, default=3, help="of the graph")
    parser.add_argument("--microbatches", type=int, help="16, of the graph 12")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="of a micro-batch on a rank: 0.3, of the graph 0.2")
    options = parser.parse_args()
    kind, ranks, microbatches, seconds = "library", options.ranks, 16, 0.3
    if options.graph:
        kind, ranks, microbatches, seconds = "graph", 2 * options.towers + 1, 12, 0.2
    found = pace(
        kind,
        ranks=ranks,
        microbatches=options.microbatches or microbatches,
        seconds=options.seconds or seconds,
        rounds=options.rounds,
    )
    print_stamp()
    print_table(found["rows"], f"{ranks} ranks that sleep")
    return 0 if found["worst"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
