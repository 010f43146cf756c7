"""Towers side by side against one after another, on real ranks that sleep for the given times.

    python bench/graph_pacing.py [--towers 3] [--microbatches 12] [--rounds 3] [--seconds 0.2]

Towers of two stages each and a join, one stage per process, uneven times as in pacing.py: the real worker,
the real program, real messages over gloo. `dag` has the edges of the data; in `chain` every stage also waits
for the one in front of it, as where values are handed on from stage to stage. Each is predicted with the link
as measured in the same run. Writes bench/results/graph_pacing.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from machine import describe_machine
from pacing import CPU, LIMIT, MESSAGE_BYTES, PacedRank, times

from pipeloom import schedules
from pipeloom.ir.cluster import Cluster, Device
from pipeloom.ir.flow import dag
from pipeloom.ir.stages import StageGraph
from pipeloom.lowering import lower
from pipeloom.runtime import HostClock
from pipeloom.runtime.calibration import measure_link
from pipeloom.runtime.launch import connect, launch, watch_ranks
from pipeloom.runtime.transports import DistChannel
from pipeloom.simulator import simulate

RESULTS = Path(__file__).parent / "results" / "graph_pacing.json"
CASES = [(name, shape) for name in ("1f1b", "zb_h1") for shape in ("dag", "chain")]


def shapes(towers: int) -> dict[str, StageGraph]:
    """The stage graph of the towers, and the same with every stage behind the one in front of it."""
    join = 2 * towers
    edges = {(2 * t, 2 * t + 1) for t in range(towers)} | {(2 * t + 1, join) for t in range(towers)}
    row = edges | {(s, s + 1) for s in range(join)}
    return {
        "dag": dag(join + 1, sorted(edges), value_bytes=MESSAGE_BYTES),
        "chain": dag(join + 1, sorted(row), value_bytes=MESSAGE_BYTES),
    }


def rank_main(towers: int, microbatches: int, rounds: int, seconds: float, file: Path) -> None:
    torch.set_num_threads(1)
    group = connect(CPU, timeout_s=120)
    with watch_ranks(group) as watch:
        channel = DistChannel(group, watch, device=CPU, timeout_s=120)
        link = measure_link(channel, MESSAGE_BYTES, HostClock(), CPU)
        ranks = 2 * towers + 1
        cluster = Cluster(devices=(Device(name="paced", memory_bytes=2**40),) * ranks, within_node=link)
        costs, placement = times(ranks, seconds), tuple(range(ranks))
        built = schedules.Times(costs=costs, transfer_s=link.transfer_s(MESSAGE_BYTES))
        rows = []
        for name, shape in CASES:
            stages = shapes(towers)[shape]
            schedule = schedules.build(name, stages, placement, microbatches, times=built)
            program = lower(schedule, stages)
            predicted_s = simulate(program, stages, costs, cluster).step_s
            rank = PacedRank(program, stages, costs, channel, watch)
            steps = [rank.step().step_s for _ in range(rounds)]
            measured_s = statistics.median(steps)
            held = max(schedules.in_flight(schedule))
            rows.append(
                {
                    "schedule": name,
                    "shape": shape,
                    "in_flight": held,
                    "predicted_s": predicted_s,
                    "measured_s": measured_s,
                    "steps_s": steps,
                    "error": predicted_s / measured_s - 1,
                }
            )
            if dist.get_rank() == 0:
                print(
                    f"{name:<6} {shape:<6} at most {held} in flight; predicted {predicted_s:.3f} s, measured "
                    f"{measured_s:.3f} s ({rows[-1]['error']:+.2%})",
                    flush=True,
                )
        if dist.get_rank() == 0:
            file.write_text(json.dumps(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--towers", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a micro-batch on a rank, on average")
    options = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        arguments = (options.towers, options.microbatches, options.rounds, options.seconds, file)
        if launch(rank_main, 2 * options.towers + 1, args=arguments) != 0:
            return 1
        rows = json.loads(file.read_text())
    worst = max(abs(row["error"]) for row in rows)
    RESULTS.write_text(json.dumps({"machine": machine, "worst": worst, "rows": rows}, indent=1) + "\n")
    print(f"largest error of the step time {worst:.2%}, limit {LIMIT:.0%}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
