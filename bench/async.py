"""Does 2BW keep the pipeline full? Ranks that sleep, and two ranks that compute.

    python bench/async.py [--only paced] [--steps 4] [--rounds 4]

Paced: four stages, eight micro-batches per pipeline; every rank is a process with the real worker, messages
over gloo and stages that sleep. The bubble-free rate is one step per m micro-batches of the slowest rank.
1F1B drains: m / (m + d - 1) of that at best, 8/11. 2BW also with clipping, with a sum of tied gradients, and
with two pipelines whose sum of gradients takes half a step. The simulator gets the same program and times.

Computing: two GPTs on two ranks of one thread, in turns within one run: one process alone, two such processes
at once, GPipe, 1F1B, 2BW. Timed are the steps between two moments at which the pipeline is full. "limit" is
what two processes that do not talk to each other reach on this machine: one process alone over each of two at
once. Per micro-batch 2BW pays what the stages differ by, or the two messages that the first stage waits
for, whichever is more: with d - s micro-batches in flight nothing hides them. So the bar is held against the
wide GPT, whose micro-batches take long beside that; the default job of `pipeloom train` stands beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import print_stamp, print_table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from paced import PacedRank, PacedSteadyRank  # noqa: E402

from pipeloom import Pipeline, Plan, plan  # noqa: E402
from pipeloom.ir.cluster import Cluster, Device  # noqa: E402
from pipeloom.ir.costs import StageCost, equal_costs  # noqa: E402
from pipeloom.ir.flow import dag  # noqa: E402
from pipeloom.ir.stages import StageGraph, replicate  # noqa: E402
from pipeloom.ir.steady import SteadyStep  # noqa: E402
from pipeloom.ir.timeline import Timeline  # noqa: E402
from pipeloom.ir.weight_policy import Updates  # noqa: E402
from pipeloom.lowering.passes import lower  # noqa: E402
from pipeloom.planning import capture, profile
from pipeloom.runtime.calibration.link import measure_link  # noqa: E402
from pipeloom.runtime.launch.connect import connect, watch_ranks  # noqa: E402
from pipeloom.runtime.launch.launch import launch  # noqa: E402
from pipeloom.runtime.recorder import HostClock  # noqa: E402
from pipeloom.runtime.transports.dist_channel import DistChannel  # noqa: E402
from pipeloom.runtime.transports.local_channel import local_channels  # noqa: E402
from pipeloom.schedules import registry  # noqa: E402
from pipeloom.schedules.registry import build_steady  # noqa: E402
from pipeloom.simulator.simulate import simulate  # noqa: E402
from pipeloom.train.config import Config, ModelConfig, PipelineConfig  # noqa: E402
from pipeloom.train.workload import job_of  # noqa: E402

DEPTH, MICROBATCHES = 4, 8
MESSAGE_BYTES = 64 * 1024
CPU = torch.device("cpu")
FILLING = 2
"""Steps at the start of each segment that are not timed."""
JOBS = {
    "default": Config(),
    "wide": Config(
        model=ModelConfig(layers=8, width=256),
        pipeline=PipelineConfig(microbatches=MICROBATCHES, microbatch_size=2),
    ),
}
BUBBLE_FREE, ERROR = 0.97, 0.03


@dataclass(frozen=True, kw_only=True)
class PacedCase:
    """name: of the row.  weights: the policy.  tied: the last stage shares a parameter with the first.
    sum_share: seconds of each sum of gradients, as a share of the bubble-free step."""

    name: str
    weights: str = "2bw"
    clips: bool = False
    tied: bool = False
    width: int = 1
    sum_share: float = 0.0


CASES = (
    PacedCase(name="1f1b", weights="flush"),
    PacedCase(name="2bw"),
    PacedCase(name="2bw, clipping", clips=True),
    PacedCase(name="2bw, ties", tied=True),
    PacedCase(name="2bw, two pipelines, a sum of half a step", width=2, sum_share=0.5),
)


def stages_of(case: PacedCase) -> tuple[StageGraph, tuple[int, ...]]:
    """The stages of all pipelines, and their ranks: replicas of a stage on neighbouring ones."""
    params = {s: (f"w{s}",) for s in range(DEPTH)}
    if case.tied:
        params[DEPTH - 1] = ("w0",)
    edges = [(s, s + 1) for s in range(DEPTH - 1)]
    stages = replicate(dag(DEPTH, edges, value_bytes=MESSAGE_BYTES, params=params), case.width)
    return stages, tuple(s * case.width + r for r in range(case.width) for s in range(DEPTH))


def body_of(case: PacedCase) -> SteadyStep:
    """The step that 1F1B repeats, in each of the pipelines."""
    updates = Updates(policy=case.weights, every=MICROBATCHES)
    stages, placement = stages_of(case)
    return build_steady("1f1b", stages, placement, updates)


def costs_of(case: PacedCase, seconds: float) -> tuple[StageCost, ...]:
    third = seconds / 3
    return equal_costs(DEPTH * case.width, forward_s=third, input_grad_s=third, weight_grad_s=third)


def run_case(case: PacedCase, steps: int, seconds: float, file: Path) -> None:
    """What one rank runs."""
    torch.set_num_threads(1)
    group = connect(CPU, timeout_s=120)
    with watch_ranks(group) as watch:
        channel = DistChannel(group, watch, device=CPU, timeout_s=120)
        link = measure_link(channel, MESSAGE_BYTES, HostClock(), CPU)
        ranks = DEPTH * case.width
        cluster = Cluster(devices=(Device(name="paced", memory_bytes=2**40),) * ranks, within_node=link)
        (stages, placement), costs = stages_of(case), costs_of(case, seconds)
        ideal_s = MICROBATCHES * seconds
        if case.weights == "flush":
            made = registry.build("1f1b", stages, placement, MICROBATCHES)
            program = lower(made, stages)
            predicted_s = simulate(program, stages, costs, cluster).step_s
            rank = PacedRank(program, stages, costs, channel, watch)
            measured_s = statistics.median(rank.step().step_s for _ in range(3))
        else:
            updates = Updates(policy=case.weights, every=MICROBATCHES)
            program = lower(body_of(case).unrolled, stages, updates=updates, clips=case.clips)
            predicted_s = simulate(program, stages, costs, cluster).step_s
            steady = PacedSteadyRank(
                body_of(case),
                stages,
                costs,
                channel,
                watch,
                updates=updates,
                clips=case.clips,
                sum_s=case.sum_share * ideal_s,
            )
            measured_s = steady.steady_s(steps)
        if dist.get_rank() == 0:
            row = {"ideal_s": ideal_s, "predicted_s": predicted_s, "measured_s": measured_s}
            file.write_text(json.dumps(row))


def paced(steps: int, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "row.json"
            if launch(run_case, DEPTH * case.width, args=(case, steps, seconds, file)) != 0:
                raise SystemExit(f"{case.name} failed")
            row = json.loads(file.read_text())
        of_bubble_free, error = row["ideal_s"] / row["measured_s"], row["predicted_s"] / row["measured_s"] - 1
        row = {"case": case.name, **row, "of_bubble_free": of_bubble_free, "error": error}
        rows.append(row)
    return rows


def plans(config: Config) -> dict[str, Plan]:
    """Of a GPT: uncut, and in two stages by three schedules."""
    job, size = job_of(config), config.pipeline.microbatch_size
    captured = capture(job, size)
    profiled = profile(captured)

    def made(stages: int, schedule: str, weights: str | None = None) -> Plan:
        return plan(
            job,
            ranks=stages,
            microbatches=MICROBATCHES,
            microbatch_size=size,
            schedule=schedule,
            weights=weights,
            captured=captured,
            profiled=profiled,
        )

    return {
        "one": made(1, "1f1b"),
        "gpipe": made(2, "gpipe"),
        "1f1b": made(2, "1f1b"),
        "2bw": made(2, "1f1b", "2bw"),
    }


def steady_s(pipeline: Pipeline, batch: dict[str, torch.Tensor], steps: int) -> float:
    """Seconds a step, of `steps` of them behind those that fill the pipeline and before it drains."""
    asked = []

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(FILLING + steps + 1):
            asked.append(time.perf_counter())
            yield batch

    for _ in pipeline.steps(batches()):
        pass
    return (asked[-1] - asked[FILLING]) / steps


def replayed_s(rows: list[list[tuple[str, float]]]) -> float:
    """Seconds of what two ranks computed, in the order of each, if messages took no time.

    rows: per rank (action, seconds). A forward on rank 1 waits for that on rank 0, a backward on rank 0 for
    that on rank 1; what came before the first of them is no matter.
    """
    first, second = ({action[1:] for action, _ in row} for row in rows)  # without the stage's digit
    ends: dict[str, float] = {}
    clocks, at = [0.0, 0.0], [0, 0]
    while at[0] < len(rows[0]) or at[1] < len(rows[1]):
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action, seconds = row[at[rank]]
                needs_other = action[1] == ("B" if rank == 0 else "F")
                other = f"{1 - rank}{action[1:]}"
                if needs_other and action[1:] in (second, first)[rank] and other not in ends:
                    break
                begin = max(clocks[rank], ends.get(other, 0.0) if needs_other else 0.0)
                clocks[rank] = ends[action] = begin + seconds
                at[rank] += 1
    return max(clocks)


def replay_of(timeline: Timeline) -> dict[str, float]:
    """Of steps of two ranks: as measured; as computed if messages took no time; and if, besides, each action
    took as long as the middle one of its kind on its rank. The last two differ by what the ranks' times
    vary: with d - s in flight each waits for whichever of the two is late."""
    rows: list[list[tuple[str, float]]] = [[], []]
    for event in sorted(timeline.events, key=lambda e: e.start_s):
        if event.stream == "compute":
            rows[event.rank].append((event.action, event.end_s - event.start_s))
    even = []
    for row in rows:
        kinds = {action[:2] for action, _ in row}
        middle = {k: statistics.median(s for action, s in row if action[:2] == k) for k in kinds}
        even.append([(action, middle[action[:2]]) for action, _ in row])
    start = min(event.start_s for event in timeline.events)
    return {
        "measured_s": max(event.end_s for event in timeline.events) - start,
        "without_latency_s": replayed_s(rows),
        "without_variation_s": replayed_s(even),
        "busiest_rank_s": max(sum(seconds for _, seconds in row) for row in rows),
    }


def run_real(folder: Path, config: Config, steps: int, rounds: int) -> None:
    """What one of two ranks runs: all parties in turns."""
    torch.set_num_threads(1)
    group = connect(CPU, timeout_s=300)
    rank, job = dist.get_rank(), job_of(config)
    names = json.loads((folder / "names.json").read_text())
    size = config.pipeline.microbatch_size
    batch = job.batch(0, MICROBATCHES * size)
    captured = capture(job, size)
    seconds: dict[str, list[float]] = {name: [] for name in ("one", "limit", *names)}
    peaks: dict[str, dict[str, list[int]]] = {}

    alone = Pipeline(job, folder / "one.json", channel=local_channels(1)[0], captured=captured)
    together = {
        name: Pipeline(job, folder / f"{name}.json", captured=captured, group=group) for name in names
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
        if number:
            for name, took in taken.items():
                seconds[name].append(took)
    for name, pipeline in together.items():
        assert pipeline.report is not None
        expected = pipeline.expected
        peaks[name] = {
            "measured": list(pipeline.report.peak_bytes),
            "predicted": [expected.peak_bytes(r) for r in range(2)],
        }
    replay = replay_of(together["2bw"].measured())
    if rank == 0:
        figures = {"seconds": seconds, "peaks": peaks, "replay": replay}
        (folder / "seconds.json").write_text(json.dumps(figures))
    for pipeline in reversed(together.values()):
        pipeline.close()
    alone.close()


def real(config: Config, steps: int, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        made = plans(config)
        for name, one in made.items():
            one.save(folder / f"{name}.json")
        (folder / "names.json").write_text(json.dumps([name for name in made if name != "one"]))
        if launch(run_real, 2, args=(folder, config, steps, rounds)) != 0:
            raise SystemExit("the two ranks failed")
        seen = json.loads((folder / "seconds.json").read_text())
    rounds_of = seen["seconds"]
    middle = {name: statistics.median(values) for name, values in rounds_of.items()}
    limits = [one / both for one, both in zip(rounds_of["one"], rounds_of["limit"], strict=True)]
    limit = statistics.median(limits)
    print_table(
        [
            {
                "limit over one process": limit,
                "predicted_step_s": made["2bw"].predicted_step_s,
                "turns_s": [stage.turn_s for stage in made["2bw"].stages],
                "three steps of 2bw": seen["replay"],
            }
        ]
    )
    rows = []
    for name in seen["peaks"]:
        speedups = [one / own for one, own in zip(rounds_of["one"], rounds_of[name], strict=True)]
        shares = [speedup / most for speedup, most in zip(speedups, limits, strict=True)]
        error = max(
            abs(predicted / measured - 1)
            for predicted, measured in zip(
                *(seen["peaks"][name][k] for k in ("predicted", "measured")), strict=True
            )
        )
        rows.append(
            {
                "pipeline": name,
                "step_s": middle[name],
                "over_one_process": statistics.median(speedups),
                "of_limit": statistics.median(shares),
                "of_limit_quartiles": statistics.quantiles(shares, n=4)[::2] if len(shares) > 1 else None,
                "peak_error": error,
            }
        )
    return rows


def main(only: str | None, steps: int, rounds: int, seconds: float) -> int:
    passed = {}
    print_stamp()
    if only in (None, "paced"):
        rows = paced(steps, seconds)
        print_table(rows, f"Ranks that sleep for {seconds:g} s per micro-batch")
        full = [row for row in rows if row["case"].startswith("2bw")]
        passed["paced 2bw keeps the pipeline full"] = all(r["of_bubble_free"] >= BUBBLE_FREE for r in full)
        passed["simulated steady step"] = all(abs(row["error"]) <= ERROR for row in full)
    for name, config in JOBS.items():
        if only in (None, name):
            rows = real(config, steps, rounds)
            layers, width = config.model.layers, config.model.width
            print_table(rows, f"Two ranks, {name}: {layers} layers of width {width}")
            steady = next(row for row in rows if row["pipeline"] == "2bw")
            passed[f"peak memory, {name}"] = steady["peak_error"] <= ERROR
            if name == "wide":
                passed["two ranks"] = steady["of_limit"] >= BUBBLE_FREE
    print_table([passed])
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("paced", *JOBS), help="this part alone")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.8, help="of a micro-batch on a paced rank")
    arguments = parser.parse_args()
    sys.exit(main(arguments.only, arguments.steps, arguments.rounds, arguments.seconds))
