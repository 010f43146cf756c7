"""PipeDream-2BW (arXiv 2006.09503): is the pipeline full?

    python bench/two_bw.py paced wide [--steps 4] [--rounds 4]

paced        Four stages, eight micro-batches per pipeline; every rank is a process with the real worker,
             messages over gloo and stages that sleep. The bubble-free rate is one step per m micro-batches
             of the slowest rank. 1F1B drains: m / (m + d - 1) of that at best, 8/11. 2BW also with clipping,
             with a sum of tied gradients, and with two pipelines whose sum of gradients takes half a step.
             The simulator gets the same program and times.
wide         A GPT of 8 layers of width 256 on two ranks of one thread, in turns: one process alone, two such
             processes at once, 1F1B, 2BW. Timed are the steps between two moments at which the pipeline is
             full. "limit" is one process alone over each of two at once. Per micro-batch 2BW pays what the
             stages differ by, or the two messages that the first stage waits for, whichever is more.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from machine import on_ranks, parser_of, print_table, run_parts
from pacing import pace
from torch import Tensor

from pipeloom import Pipeline, Plan, capture, plan
from pipeloom.planning import profile
from pipeloom.runtime.channel import local_channels
from pipeloom.runtime.connect import connect
from pipeloom.train.config import Config, ModelConfig, PipelineConfig
from pipeloom.train.workload import job_of

CPU = torch.device("cpu")
BUBBLE_FREE, ERROR = 0.97, 0.03

# --- ranks that sleep -----------------------------------------------------------------------------

DEPTH, MICROBATCHES = 4, 8


def paced(steps: int, seconds: float) -> bool:
    shape = {"microbatches": MICROBATCHES, "seconds": seconds, "rounds": steps}
    rows = [row for ranks in (DEPTH, 2 * DEPTH) for row in pace("steady", ranks=ranks, **shape)]
    for row in rows:
        row["of_bubble_free"] = row["ideal_s"] / row["measured_s"]
    print_table(rows, f"Ranks that sleep for {seconds:g} s per micro-batch")
    return all(row["of_bubble_free"] >= BUBBLE_FREE and abs(row["error"]) <= ERROR for row in rows[1:])


# --- ranks that compute ---------------------------------------------------------------------------

FILLING = 2
"""Steps at the start of each segment that are not timed."""

WIDE = Config(
    model=ModelConfig(layers=8, width=256),
    pipeline=PipelineConfig(microbatches=MICROBATCHES, microbatch_size=2),
)


def plans(config: Config) -> dict[str, Plan]:
    """Of a GPT: uncut, and in two stages by two schedules."""
    job, size = job_of(config), config.pipeline.microbatch_size
    captured = capture(job, size)
    shared = {"microbatches": MICROBATCHES, "microbatch_size": size, "captured": captured}
    shared["profiled"] = profile(captured)
    return {
        "one": plan(job, ranks=1, schedule="1f1b", **shared),
        "1f1b": plan(job, ranks=2, schedule="1f1b", **shared),
        "2bw": plan(job, ranks=2, schedule="1f1b", weights="2bw", **shared),
    }


def steady_s(pipeline: Pipeline, batch: dict[str, Tensor], steps: int) -> float:
    """Seconds a step, of `steps` of them behind those that fill the pipeline and before it drains."""
    asked = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for _ in range(FILLING + steps + 1):
            asked.append(time.perf_counter())
            yield batch

    for _ in pipeline.steps(batches()):
        pass
    return (asked[-1] - asked[FILLING]) / steps


def compute(made: dict[str, Plan], config: Config, steps: int, rounds: int) -> dict[str, Any]:
    """What one of two ranks runs: all parties in turns."""
    group = connect(CPU, timeout_s=300)
    rank, job, size = dist.get_rank(), job_of(config), config.pipeline.microbatch_size
    batch, captured = job.batch(0, MICROBATCHES * size), capture(job, size)
    seconds: dict[str, list[float]] = {name: [] for name in ("limit", *made)}
    alone = Pipeline(job, made["one"], channel=local_channels(1)[0], captured=captured)
    together = {
        n: Pipeline(job, one, captured=captured, group=group) for n, one in made.items() if n != "one"
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
        for name, took in taken.items() if number else ():
            seconds[name].append(took)
    errors = {}
    for name, pipeline in together.items():
        assert pipeline.report is not None
        peaks = ((pipeline.expected.peak_bytes(r), pipeline.report.peak_bytes[r]) for r in range(2))
        errors[name] = max(abs(predicted / measured - 1) for predicted, measured in peaks)
    for pipeline in reversed(together.values()):
        pipeline.close()
    alone.close()
    return {"seconds": seconds, "errors": errors}


def real(steps: int, rounds: int) -> bool:
    config = WIDE
    made = plans(config)
    seen = on_ranks(compute, 2, made, config, steps, rounds)[0]
    seconds = seen["seconds"]
    limits = [one / both for one, both in zip(seconds["one"], seconds["limit"], strict=True)]
    rows = []
    for pipeline, error in seen["errors"].items():
        speedups = [one / own for one, own in zip(seconds["one"], seconds[pipeline], strict=True)]
        shares = [speedup / most for speedup, most in zip(speedups, limits, strict=True)]
        row: dict[str, Any] = {"pipeline": pipeline, "step_s": statistics.median(seconds[pipeline])}
        row |= {"over_one_process": statistics.median(speedups), "of_limit": statistics.median(shares)}
        rows.append(row | {"peak_error": error})
    print(f"limit over one process {statistics.median(limits):.3f}")
    print_table(rows, f"Two ranks, {config.model.layers} layers of width {config.model.width}")
    steady = rows[-1]
    return bool(steady["peak_error"] <= ERROR and steady["of_limit"] >= BUBBLE_FREE)


def main() -> int:
    parts: dict[str, Callable[[], Any]] = {
        "paced": lambda: paced(given.steps, given.seconds),
        "wide": lambda: real(given.steps, given.rounds),
    }
    parser = parser_of(__doc__, parts)
    parser.add_argument("--steps", type=int, default=4, help="of ranks that sleep or compute")
    parser.add_argument("--rounds", type=int, default=4, help="of ranks that compute")
    parser.add_argument("--seconds", type=float, default=0.8, help="of a micro-batch on a paced rank")
    given = parser.parse_args()
    return run_parts(given.parts, parts)


if __name__ == "__main__":
    sys.exit(main())
