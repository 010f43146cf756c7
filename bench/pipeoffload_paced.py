"""Paced ranks with residuals: stages and copies that sleep, so that four ranks fit two cores.

Every rank is a process with the real worker, real messages and a real tier, of which each copy sleeps as long
as the ratio k says. The simulator gets the same program and times, and the link as measured between ranks.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pacing import CPU, MESSAGE_BYTES, PacedRank, PacedTier, times

from pipeloom import schedules
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Program
from pipeloom.ir.stages import StageGraph
from pipeloom.lowering import lower
from pipeloom.runtime import HostClock
from pipeloom.runtime.calibration import measure_link
from pipeloom.runtime.launch import connect, launch, watch_ranks
from pipeloom.runtime.transports import DistChannel
from pipeloom.simulator import simulate

RANKS, CHUNKS, MICROBATCHES, ROUNDS = 4, 2, 8, 3
NAMES = (("po_f", CHUNKS), ("po_h", CHUNKS), ("1f1b:offload=1", 1))
RATIOS = (0.5, 1.0)
SECONDS = 0.3
"""Of one micro-batch on a stage, on average: messages of a busy machine do not matter then."""

KEPT_BYTES = 4096


def case(
    name: str, chunks: int, k: float, seconds: float, link: Link
) -> tuple[Program, StageGraph, tuple[StageCost, ...]]:
    """A schedule with copies built for these times."""
    _, placement = schedules.default_placement(name, RANKS, chunks)
    count = len(placement)
    stages = dag(count, [(s, s + 1) for s in range(count - 1)], value_bytes=MESSAGE_BYTES)
    sized = [replace(cost, residual_bytes=KEPT_BYTES) for cost in times(count, seconds)]
    costs = schedules.with_copies(sized, k)
    built = schedules.Times(costs=costs, transfer_s=link.transfer_s(MESSAGE_BYTES))
    made = schedules.build(name, stages, placement, MICROBATCHES, times=built)
    return lower(made, stages), stages, costs


def rank_main(rounds: int, seconds: float, folder: Path) -> None:
    torch.set_num_threads(1)
    group = connect(CPU, timeout_s=120)
    with watch_ranks(group) as watch:
        channel = DistChannel(group, watch, device=CPU, timeout_s=120)
        link = measure_link(channel, MESSAGE_BYTES, HostClock(), CPU)
        cluster = Cluster(devices=(Device(name="paced", memory_bytes=2**40),) * RANKS, within_node=link)
        rows = []
        for (name, chunks), k in [(name, k) for name in NAMES for k in RATIOS]:
            program, stages, costs = case(name, chunks, k, seconds, link)
            predicted_s = simulate(program, stages, costs, cluster).step_s
            tier = PacedTier(folder / "away", channel.rank, costs)
            rank = PacedRank(program, stages, costs, channel, watch, tier=tier)
            steps = [rank.step().step_s for _ in range(rounds)]
            tier.close()
            measured_s = statistics.median(steps)
            row = {"schedule": name, "chunks": chunks, "k": k, "predicted_s": predicted_s}
            row |= {"measured_s": measured_s, "steps_s": steps, "error": predicted_s / measured_s - 1}
            rows.append(row)
            if dist.get_rank() == 0:
                print(
                    f"  {name}, k {k}: measured {measured_s:.3f} s, predicted {predicted_s:.3f} s "
                    f"({row['error']:+.2%})",
                    flush=True,
                )
        if dist.get_rank() == 0:
            (folder / "rows.json").write_text(json.dumps(rows))


def paced(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if launch(rank_main, RANKS, args=(1 if quick else ROUNDS, 0.03 if quick else SECONDS, folder)) != 0:
            raise SystemExit("paced ranks failed")
        rows = json.loads((folder / "rows.json").read_text())
    worst = max(abs(row["error"]) for row in rows)
    print(f"paced: largest error of the step {worst:.2%}")
    return {"rows": rows, "worst": worst, "ranks": RANKS, "microbatches": MICROBATCHES, "seconds": SECONDS}
