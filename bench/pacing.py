"""Does the simulator agree with the real runtime? Ranks that sleep for the given times instead of computing.

    python bench/pacing.py [--ranks 8] [--microbatches 16] [--rounds 3] [--seconds 0.3]

Every rank is a process with the real worker, the real program and real messages over gloo; only its stages
sleep instead of computing, so that eight ranks fit two cores. Stages take uneven times: up to 25 % more or
less than the average, and I and W differ. The simulator gets the same program, the same times, and the link
as measured between ranks 0 and 1 in the same run. A busy machine wakes sleepers late: "overslept" says by
how much, and belongs to the machine, not to the simulator.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from paced import PacedRank, PacedTier as PacedTier  # noqa: E402

from pipeloom import schedules  # noqa: E402
from pipeloom.ir.cluster import Cluster, Device, Link  # noqa: E402
from pipeloom.ir.costs import StageCost  # noqa: E402
from pipeloom.ir.flow import dag  # noqa: E402
from pipeloom.ir.schedule import Program  # noqa: E402
from pipeloom.ir.stages import StageGraph, replicate  # noqa: E402
from pipeloom.lowering import lower  # noqa: E402
from pipeloom.runtime import HostClock  # noqa: E402
from pipeloom.runtime.calibration import measure_link  # noqa: E402
from pipeloom.runtime.launch import connect, launch, watch_ranks  # noqa: E402
from pipeloom.runtime.transports import DistChannel  # noqa: E402
from pipeloom.simulator import Summary, simulate, summarise  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "pacing.json"
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "v_half", "dualpipev", "dualpipe")
LIMIT = 0.03
MESSAGE_BYTES = 64 * 1024
CPU = torch.device("cpu")


def times(stages: int, share_s: float) -> tuple[StageCost, ...]:
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


def case(
    name: str, ranks: int, microbatches: int, seconds: float, link: Link
) -> tuple[Program, StageGraph, tuple[StageCost, ...]]:
    """A schedule built for these times. seconds: of one micro-batch on all stages of a rank, on average."""
    shape, placement = schedules.default_placement(name, ranks)
    count = len(placement) // shape.replicas
    one = dag(count, [(s, s + 1) for s in range(count - 1)], value_bytes=MESSAGE_BYTES)
    stages = replicate(one, shape.replicas)
    costs = times(count, seconds * ranks / count) * shape.replicas
    built = schedules.Times(costs=costs, transfer_s=link.transfer_s(MESSAGE_BYTES))
    made = schedules.build(name, stages, placement, microbatches // shape.replicas, times=built)
    return lower(made, stages), stages, costs


def _busy(step: Summary) -> float:
    return sum(rank.busy_s for rank in step.ranks)


def rank_main(ranks: int, microbatches: int, rounds: int, seconds: float, file: Path) -> None:
    torch.set_num_threads(1)
    group = connect(CPU, timeout_s=120)
    with watch_ranks(group) as watch:
        channel = DistChannel(group, watch, device=CPU, timeout_s=120)
        link = measure_link(channel, MESSAGE_BYTES, HostClock(), CPU)
        cluster = Cluster(devices=(Device(name="paced", memory_bytes=2**40),) * ranks, within_node=link)
        rows = []
        for name in NAMES:
            program, stages, costs = case(name, ranks, microbatches, seconds, link)
            predicted = summarise(simulate(program, stages, costs, cluster))
            rank = PacedRank(program, stages, costs, channel, watch)
            steps = [summarise(rank.step()) for _ in range(rounds)]
            measured_s = statistics.median(step.step_s for step in steps)
            rows.append(
                {
                    "schedule": name,
                    "predicted_s": predicted.step_s,
                    "measured_s": measured_s,
                    "steps_s": [step.step_s for step in steps],
                    "predicted_bubble": predicted.bubble,
                    "measured_bubble": statistics.median(step.bubble for step in steps),
                    "overslept": statistics.median(_busy(step) for step in steps) / _busy(predicted) - 1,
                    "error": predicted.step_s / measured_s - 1,
                }
            )
            if dist.get_rank() == 0:
                print(
                    f"{name:<18} predicted {predicted.step_s:.3f} s, measured {measured_s:.3f} s "
                    f"({rows[-1]['error']:+.2%}); bubble {predicted.bubble:.1%}, "
                    f"measured {rows[-1]['measured_bubble']:.1%}; actions took "
                    f"{rows[-1]['overslept']:.2%} longer than asked",
                    flush=True,
                )
        if dist.get_rank() == 0:
            about = {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
            file.write_text(json.dumps({"link": about, "rows": rows}))


def main(ranks: int, microbatches: int, rounds: int, seconds: float) -> int:
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        if launch(rank_main, ranks, args=(ranks, microbatches, rounds, seconds, file)) != 0:
            return 1
        found = json.loads(file.read_text())
    worst = max(abs(row["error"]) for row in found["rows"])
    table = {
        "machine": machine,
        "ranks": ranks,
        "microbatches": microbatches,
        "seconds_per_microbatch": seconds,
        "message_bytes": MESSAGE_BYTES,
        "limit": LIMIT,
        "worst": worst,
        "passed": worst <= LIMIT,
        **found,
    }
    RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    print(f"largest error of the step time {worst:.2%}, limit {LIMIT:.0%}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a micro-batch on a rank, on average")
    arguments = parser.parse_args()
    sys.exit(main(arguments.ranks, arguments.microbatches, arguments.rounds, arguments.seconds))
