"""Speed: pipeloom's 1F1B against torch.distributed.pipelining's 1F1B and against one process.

All train the same model on the same micro-batches, on ranks of one thread each, in turns within one run, so
that a machine shared with others disturbs them alike; in an order drawn for each round, as what ran before
matters. Where a pipeline's tensors come to lie in memory stays for as long as it lives, and changes its times
by up to 20 % (two equal ones in one process): ratios are medians over the rounds of several launches, in each
of which pipelines are made in another order. Those of each launch are given too, and those of the fastest
steps, which other programs have disturbed least. "pipeloom" is cut between the same blocks as torch's
pipeline; "planned" is cut by pipeloom's planner.

    python bench/throughput.py [--microbatches 8 16] [--launches 3] [--rounds 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from machine import describe_machine
from model import BLOCKS, MICROBATCH, Gpt, batch_of, job
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipeloom import Pipeline, Plan, plan
from pipeloom import schedules as known
from pipeloom.api.passes import capture
from pipeloom.ir.plan import StagePlan
from pipeloom.ir.stages import cut
from pipeloom.runtime.launch import launch

RESULTS = Path(__file__).parent / "results"
WARM_UP = 2
"""Rounds of each launch that do not count."""

PARTS = ("busy_s", "waited_s")


class Launch(TypedDict):
    """What one launch saw: seconds by name and round; for rounds of pipeloom's, shares of the wall time."""

    seconds: dict[str, list[float]]
    own: list[dict[str, Any]]


def halves(microbatches: int) -> Plan:
    """The plan that cuts the model between its middle blocks, as the torch side is cut."""
    graph = capture(job(), MICROBATCH).graph
    own = [op for op in graph.ops if not op.cheap]
    middle = next(i for i, op in enumerate(own) if op.module.startswith(f"blocks.{BLOCKS // 2}"))
    stages = cut(graph, {op.name: int(i >= middle) for i, op in enumerate(own)})
    schedule = known.build("1f1b", stages, (0, 1), microbatches)
    return Plan(
        graph=graph.fingerprint, planner="by hand", placement=(0, 1), schedule="1f1b",
        stages=tuple(StagePlan(ops=stage.ops) for stage in stages.stages),
        schedule_rows=tuple(str(schedule).splitlines()),
        microbatches=microbatches, microbatch_size=MICROBATCH,
    )  # fmt: skip


def planned(microbatches: int) -> Plan:
    """pipeloom's own cut, between single ops, from costs measured here."""
    return plan(job(), stages=2, microbatches=microbatches, microbatch_size=MICROBATCH)


class TorchPipeline:
    """The same two halves under torch.distributed.pipelining."""

    def __init__(self, rank: int, microbatches: int) -> None:
        torch.manual_seed(0)
        module = Gpt().half(rank)
        self.rank = rank
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=Gpt.loss_of)

    def step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        if self.rank == 0:
            self.schedule.step(batch["tokens"])
        else:
            losses: list[Tensor] = []
            self.schedule.step(target=batch["targets"], losses=losses)
        self.optimizer.step()


class OneProcess:
    """The whole model on one thread."""

    def __init__(self, microbatches: int) -> None:
        torch.manual_seed(0)
        self.model = Gpt()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.microbatches = microbatches

    def step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        parts = {name: t.split(MICROBATCH) for name, t in batch.items()}
        for m in range(self.microbatches):
            loss = self.model(parts["tokens"][m], parts["targets"][m])["loss"]
            (loss / self.microbatches).backward()
        self.optimizer.step()


def measure(microbatches: int, rounds: int, seed: int) -> Launch | None:
    """Run on each of two ranks; rank 0 returns what it saw. seed: of the order of turns."""
    torch.set_num_threads(1)
    draw = Random(seed)
    with Pipeline(job(), halves(microbatches)) as first:
        rank = first.rank
        own_plan = first.channel.broadcast_object(planned(microbatches) if rank == 0 else None)
    with ExitStack() as stack:
        make: dict[str, Callable[[], Any]] = {
            "pipeloom": lambda: stack.enter_context(Pipeline(job(), halves(microbatches))),
            "planned": lambda: stack.enter_context(Pipeline(job(), own_plan)),
            "torch": lambda: TorchPipeline(rank, microbatches),
            "one process": lambda: OneProcess(microbatches) if rank == 0 else None,
        }
        made = {name: make[name]() for name in draw.sample([*make], len(make))}
        seconds: dict[str, list[float]] = {name: [] for name in make}
        reports = []
        for index in range(rounds + WARM_UP):
            batch = batch_of(index, microbatches * MICROBATCH)
            for name in draw.sample([*make], len(make)):
                dist.barrier()
                start = time.perf_counter()
                if made[name] is not None:
                    made[name].step(batch)
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
            reports.append(made["pipeloom"].report)
        if rank != 0:
            return None
    own = [
        {part: [s / w for s, w in zip(getattr(r, part), r.wall_s, strict=True)] for part in PARTS}
        | {"overhead": r.overhead}
        for r in reports[WARM_UP:]
    ]
    return Launch(seconds={n: s[WARM_UP:] for n, s in seconds.items()}, own=own)


def summary(microbatches: int, launches: list[Launch]) -> dict[str, object]:
    def fastest(name: str) -> float:
        return min(s for launch in launches for s in launch["seconds"][name])

    def ratio(above: str, below: str) -> dict[str, object]:
        each = [
            [a / b for a, b in zip(launch["seconds"][above], launch["seconds"][below], strict=True)]
            for launch in launches
        ]
        return {
            "median": statistics.median(r for ratios in each for r in ratios),
            "launches": [statistics.median(ratios) for ratios in each],
            "of_the_fastest": fastest(above) / fastest(below),
        }

    def share(part: str) -> list[float]:
        per_rank = zip(*(report[part] for launch in launches for report in launch["own"]), strict=True)
        return [statistics.median(values) for values in per_rank]

    return {
        "microbatches": microbatches,
        "median_s": {
            name: statistics.median(s for launch in launches for s in launch["seconds"][name])
            for name in launches[0]["seconds"]
        },
        "pipeloom_over_one_process": ratio("one process", "pipeloom"),
        "planned_over_one_process": ratio("one process", "planned"),
        "torch_over_one_process": ratio("one process", "torch"),
        "pipeloom_over_torch": ratio("torch", "pipeloom"),
        "planned_over_torch": ratio("torch", "planned"),
        "limit": 2 * microbatches / (microbatches + 1),
        "compute_share": share("busy_s"),
        "wait_share": share("waited_s"),
        "own_overhead": statistics.median(own["overhead"] for launch in launches for own in launch["own"]),
    }  # fmt: skip


def rank_main(microbatches: int, rounds: int, seed: int, path: Path) -> None:
    seen = measure(microbatches, rounds, seed)
    if seen is not None:
        path.write_text(json.dumps(seen))


def report(figures: dict[str, object]) -> None:
    """Print the figures and add them to the results."""
    print(json.dumps(figures, indent=1))
    path = RESULTS / "throughput.json"
    kept = json.loads(path.read_text())["runs"] if path.exists() else []
    kept = [run for run in kept if run["microbatches"] != figures["microbatches"]]
    table = {"machine": describe_machine(), "runs": [*kept, figures]}
    path.write_text(json.dumps(table, indent=1) + "\n")


def main(counts: list[int], launches: int, rounds: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "seen.json"
        for microbatches in counts:
            seen: list[Launch] = []
            for index in range(launches):
                launch(rank_main, 2, args=(microbatches, rounds, index, path))
                seen.append(json.loads(path.read_text()))
            report(summary(microbatches, seen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8, help="of each launch")
    arguments = parser.parse_args()
    main(arguments.microbatches, arguments.launches, arguments.rounds)
