"""Speed: pipeloom's 1F1B against torch.distributed.pipelining's 1F1B and against one process.

All train the same model on the same micro-batches, on ranks of one thread each. Each party has its own
processes, started as its users start them (`pipeloom.runtime.launch`, torchrun, python), and they take turns
within one run, so that a machine shared with others disturbs them alike; in an order drawn for each round, as
what ran before matters. Where a pipeline's tensors come to lie in memory stays as long as it lives, and on
shared cores the ratio of one round varies by 15 %: ratios are medians over many rounds of several launches.
"pipeloom" is cut between the same blocks as torch's pipeline; "planned" is cut by pipeloom's planner. "two at
once" are two of "one process": what the cores of this machine take from each other bounds every pipeline
(`limit_here`).

    python bench/throughput.py [--microbatches 8] [--launches 3] [--rounds 10]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Protocol, TypedDict

import torch
import torch.distributed as dist
from machine import print_stamp, print_table
from model import BLOCKS, MICROBATCH, Gpt, batch_of, job
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipeloom import Pipeline, Plan, plan
from pipeloom.ir.plan import StagePlan
from pipeloom.ir.stages import cut
from pipeloom.planning import capture
from pipeloom.runtime.launch import launch
from pipeloom.schedules import registry

PARTIES = ("pipeloom", "planned", "torch", "one process", "two at once")
BY_TORCHRUN = ("torch", "two at once")
WARM_UP = 2
"""Rounds of each launch that do not count."""


class Party(Protocol):
    """One of those compared, in each of its processes."""

    def step(self, batch: dict[str, Tensor]) -> object: ...


class Launch(TypedDict):
    """What one launch saw: seconds by name and round; the runtime's own work as a share of pipeloom's."""

    seconds: dict[str, list[float]]
    overhead: list[float]


def halves(microbatches: int) -> Plan:
    """The plan that cuts the model between its middle blocks, as the torch side is cut."""
    graph = capture(job(), MICROBATCH).graph
    own = [op for op in graph.ops if not op.cheap]
    middle = next(i for i, op in enumerate(own) if op.module.startswith(f"blocks.{BLOCKS // 2}"))
    stages = cut(graph, {op.name: int(i >= middle) for i, op in enumerate(own)})
    schedule = registry.build("1f1b", stages, (0, 1), microbatches)
    return Plan(
        graph=graph.fingerprint,
        planner="by hand",
        placement=(0, 1),
        schedule="1f1b",
        stages=tuple(StagePlan(ops=stage.ops) for stage in stages.stages),
        schedule_rows=tuple(str(schedule).splitlines()),
        microbatches=microbatches,
        microbatch_size=MICROBATCH,
    )


def planned(microbatches: int) -> Plan:
    """pipeloom's own cut, between single ops, from costs measured here."""
    sizes = {"microbatches": microbatches, "microbatch_size": MICROBATCH}
    return plan(job(), ranks=2, planner="exact", schedule="1f1b", **sizes)


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


def serve(party: Party, rank: int, microbatches: int, conductor: str) -> None:
    """In each process of a party: take a step when told, together; rank 0 says how long it took."""
    line = Client(conductor) if rank == 0 else None
    if line is not None:
        line.send(os.environ["PARTY"])
    while (index := _told(line)) is not None:
        batch = batch_of(index, microbatches * MICROBATCH)
        _meet()
        start = time.perf_counter()
        party.step(batch)
        _meet()
        seconds = time.perf_counter() - start
        report = getattr(party, "report", None)
        if line is not None:
            line.send((seconds, report and report.overhead))


def _told(line: Connection | None) -> int | None:
    """The next round's number, from the conductor by way of rank 0; None when it is over."""
    told = [None if line is None else line.recv()]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return told[0]


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def pipeloom_main(own_plan: Plan, microbatches: int, conductor: str) -> None:
    torch.set_num_threads(1)
    with Pipeline(job(), own_plan) as pipeline:
        serve(pipeline, pipeline.rank, microbatches, conductor)


def party_main(name: str, microbatches: int, conductor: str) -> None:
    """What a party's first process runs: pipeloom's starts its ranks; torchrun has started its own."""
    os.environ["PARTY"] = name
    torch.set_num_threads(1)
    if name in ("pipeloom", "planned"):
        own_plan = planned(microbatches) if name == "planned" else halves(microbatches)
        launch(pipeloom_main, 2, args=(own_plan, microbatches, conductor))
    elif name in BY_TORCHRUN:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        party = TorchPipeline(rank, microbatches) if name == "torch" else OneProcess(microbatches)
        serve(party, rank, microbatches, conductor)
        dist.destroy_process_group()
    else:
        serve(OneProcess(microbatches), 0, microbatches, conductor)


def start(name: str, microbatches: int, conductor: str) -> subprocess.Popen[bytes]:
    python = [sys.executable]
    if name in BY_TORCHRUN:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--party", name, "--conductor", conductor, "--microbatches", str(microbatches)]
    return subprocess.Popen([*python, __file__, *words], env={**os.environ, "OMP_NUM_THREADS": "1"})


def meet(listener: Listener, name: str, party: subprocess.Popen[bytes]) -> Connection:
    """The line to a party's rank 0, once it is ready."""

    def tell_if_it_ends() -> None:
        if party.wait():
            Client(str(listener.address)).send(f"{name} ended with status {party.returncode}")

    threading.Thread(target=tell_if_it_ends, daemon=True).start()
    line = listener.accept()
    said = line.recv()
    if said != name:
        raise SystemExit(said)
    return line


def measure(microbatches: int, rounds: int, seed: int) -> Launch:
    """Start the parties, one after the other, and let them take turns. seed: of the order of both."""
    draw = Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in PARTIES}
    overhead = []
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        listener = stack.enter_context(Listener(str(Path(folder) / "conductor")))
        parties = []
        lines: dict[str, Connection] = {}
        for name in draw.sample(PARTIES, len(PARTIES)):
            parties.append(stack.enter_context(start(name, microbatches, str(listener.address))))
            stack.callback(parties[-1].terminate)
            lines[name] = meet(listener, name, parties[-1])
        for index in range(rounds + WARM_UP):
            for name in draw.sample(PARTIES, len(PARTIES)):
                lines[name].send(index)
                took, own = lines[name].recv()
                seconds[name].append(took)
                if name == "pipeloom":
                    overhead.append(own)
        for line in lines.values():
            line.send(None)
        for party in parties:
            party.wait()
    seconds = {name: taken[WARM_UP:] for name, taken in seconds.items()}
    return Launch(seconds=seconds, overhead=overhead[WARM_UP:])


def summary(microbatches: int, launches: list[Launch]) -> dict[str, object]:
    def all_of(name: str) -> list[float]:
        return [s for launch in launches for s in launch["seconds"][name]]

    def ratio(above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(all_of(above), all_of(below), strict=True))

    limit = 2 * microbatches / (microbatches + 1)
    return {
        "microbatches": microbatches,
        "median_s": {name: statistics.median(all_of(name)) for name in PARTIES},
        "over one process": {name: ratio("one process", name) for name in ("pipeloom", "planned", "torch")},
        "over torch": {name: ratio("torch", name) for name in ("pipeloom", "planned")},
        "limit": limit,
        "limit_here": limit * ratio("one process", "two at once"),
        "own_overhead": statistics.median(own for launch in launches for own in launch["overhead"]),
    }


def main(counts: list[int], launches: int, rounds: int) -> None:
    print_stamp()
    rows = [
        summary(microbatches, [measure(microbatches, rounds, index) for index in range(launches)])
        for microbatches in counts
    ]
    print_table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10, help="of each launch")
    parser.add_argument("--party", choices=PARTIES, help=argparse.SUPPRESS)
    parser.add_argument("--conductor", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.party:
        party_main(arguments.party, arguments.microbatches[0], arguments.conductor)
    else:
        main(arguments.microbatches, arguments.launches, arguments.rounds)
