"""Speed: pipeloom's 1F1B against torch.distributed.pipelining's 1F1B and against one process.

All train the same model on the same micro-batches, on ranks of one thread each, in turns within one run, so
that a machine shared with others disturbs them alike; in an order drawn for each round, as what ran before
matters. Ratios are medians over the rounds. "pipeloom" is cut between the same blocks as torch's pipeline;
"planned" is cut by pipeloom's planner.

    python bench/throughput.py [--microbatches 8 16] [--rounds 12]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random

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


def measure(microbatches: int, rounds: int) -> dict[str, object] | None:
    """Run on each of two ranks; rank 0 returns the figures."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        ours = stack.enter_context(Pipeline(job(), halves(microbatches)))
        rank = ours.rank
        own_plan = ours.channel.broadcast_object(planned(microbatches) if rank == 0 else None)
        best = stack.enter_context(Pipeline(job(), own_plan))
        theirs = TorchPipeline(rank, microbatches)
        alone = OneProcess(microbatches) if rank == 0 else None
        seconds: dict[str, list[float]] = {n: [] for n in ("pipeloom", "torch", "planned", "one process")}
        reports = []
        for index in range(rounds + 2):
            batch = batch_of(index, microbatches * MICROBATCH)
            for name in Random(index).sample([*seconds], len(seconds)):
                dist.barrier()
                start = time.perf_counter()
                if name == "pipeloom":
                    ours.step(batch)
                    reports.append(ours.report)
                elif name == "torch":
                    theirs.step(batch)
                elif name == "planned":
                    best.step(batch)
                elif alone is not None:
                    alone.step(batch)
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
        if rank != 0:
            return None
    return summary(microbatches, {n: s[2:] for n, s in seconds.items()}, reports[2:])


def summary(microbatches: int, seconds: dict[str, list[float]], reports: list) -> dict[str, object]:
    def ratio(above: str, below: str) -> float:
        pairs = zip(seconds[above], seconds[below], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def share(part: str) -> list[float]:
        per_rank = zip(*([getattr(r, part)[k] / r.wall_s[k] for k in (0, 1)] for r in reports), strict=True)
        return [statistics.median(values) for values in per_rank]

    return {
        "microbatches": microbatches,
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "pipeloom_over_one_process": ratio("one process", "pipeloom"),
        "planned_over_one_process": ratio("one process", "planned"),
        "torch_over_one_process": ratio("one process", "torch"),
        "pipeloom_over_torch": ratio("torch", "pipeloom"),
        "planned_over_torch": ratio("torch", "planned"),
        "limit": 2 * microbatches / (microbatches + 1),
        "compute_share": share("busy_s"),
        "wait_share": share("waited_s"),
        "own_overhead": statistics.median(r.overhead for r in reports),
    }


def rank_main(microbatches: list[int], rounds: int) -> None:
    for count in microbatches:
        figures = measure(count, rounds)
        if figures is not None:
            report(figures)


def report(figures: dict[str, object]) -> None:
    """Print the figures and add them to the results."""
    print(json.dumps(figures, indent=1))
    path = RESULTS / "throughput.json"
    kept = json.loads(path.read_text())["runs"] if path.exists() else []
    kept = [run for run in kept if run["microbatches"] != figures["microbatches"]]
    table = {"machine": describe_machine(), "runs": [*kept, figures]}
    path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    launch(rank_main, 2, args=(arguments.microbatches, arguments.rounds))
