"""The host's time for a step of tiny ops, against the same step written in plain PyTorch.

On a GPU the host has to be ahead of the device: what it takes for an op or an action then matters only where
kernels are as short. Here all kernels are tiny, so that a step is the host's time alone. Both parties train
the same model on the same micro-batches, in this process, in turns; ratios are medians over rounds, of the
time that this thread had a processor; on a device, where PyTorch's backward has its own thread, by the clock.

    python bench/host_time.py [--rounds 60] [--microbatches 8]      1 minute

step          a whole step: splitting the batch, forwards and backwards, the update, reading the loss
ops alone     forwards and backwards, without what pipeloom does between them
us an op      microseconds of pipeloom in functions of stages, for each of their ops
us an action  what else its step takes, without the update, for each forward and backward
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from machine import next_tokens, parser_of, print_stamp, print_table
from model import Gpt
from torch import Tensor

import pipeloom
from pipeloom import Job, Options, Pipeline
from pipeloom.tracer.stage.trace import GraphFunctions

WIDTH, HEADS, SEQUENCE, VOCABULARY, ROWS = 16, 2, 8, 32, 2


def gpt(layers: int) -> Gpt:
    """Its kernels take less than the host does to start them."""
    return Gpt(layers, VOCABULARY, WIDTH, HEADS, 2 * WIDTH)


def job(layers: int) -> Job:
    return Job(
        model=lambda: gpt(layers),
        batch=next_tokens(VOCABULARY, SEQUENCE),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        name=f"{layers} tiny layers",
    )


class Plain:
    """The step as everybody writes it. ops_s: of the last step, in forwards and backwards."""

    def __init__(self, layers: int, microbatches: int, device: str) -> None:
        torch.manual_seed(0)
        self.model, self.microbatches, self.ops_s = gpt(layers).to(device), microbatches, 0.0
        self.device = device
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        self.optimizer.zero_grad()
        parts = [t.to(self.device).split(ROWS) for t in batch.values()]
        losses, start = [], time.thread_time()
        for tokens, targets in zip(*parts, strict=True):
            loss = self.model(tokens, targets)["loss"] / self.microbatches
            loss.backward()
            losses.append(loss.detach())
        self.ops_s = time.thread_time() - start
        self.optimizer.step()
        return float(torch.stack(losses).sum())


def timed(
    step: Callable[[Mapping[str, Tensor]], float], batch: Mapping[str, Tensor], clock: Callable[[], float]
) -> float:
    start = clock()
    step(batch)
    return clock() - start


def measure(layers: int, microbatches: int, rounds: int, device: str = "cpu") -> dict[str, object]:
    tiny = job(layers)
    plan = pipeloom.plan(tiny, ranks=1, microbatches=microbatches, microbatch_size=ROWS, cluster="a100-40")
    plain = Plain(layers, microbatches, device)
    whole, ops, per_op, per_action = [], [], [], []
    clock = time.thread_time if device == "cpu" else time.perf_counter
    with Pipeline(tiny, plan, options=Options(device=device, compare=False)) as pipeline:
        if device == "cpu":
            pipeline.recorder.clock.mark = time.thread_time  # type: ignore[method-assign]
        functions = pipeline.training.planned.functions[0]
        assert isinstance(functions, GraphFunctions)
        count = microbatches * sum(
            node.op == "call_function"
            for name in ("forward", "backward")
            for node in functions.functions[name].part.graph.nodes
        )
        for index in range(rounds + 5):
            batch = tiny.batch(index, microbatches * ROWS)
            ours, theirs = timed(pipeline.step, batch, clock), timed(plain.step, batch, clock)
            report = pipeline.report
            assert report is not None
            update = next(e.duration_s for e in pipeline.measured().events if "STEP" in e.action)
            busy = report.busy_s[0] - update
            whole.append(ours / theirs)
            ops.append(busy / plain.ops_s)
            per_op.append(busy / count * 1e6)
            per_action.append((ours - report.busy_s[0]) / (2 * microbatches) * 1e6)
    warm = slice(5, None)
    return {
        "model": tiny.name,
        "micro-batches": microbatches,
        "ops": count,
        "step": statistics.median(whole[warm]),
        "ops alone": statistics.median(ops[warm]),
        "us an op": statistics.median(per_op[warm]),
        "us an action": statistics.median(per_action[warm]),
    }


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    print_stamp()
    print_table([measure(layers, arguments.microbatches, arguments.rounds) for layers in (1, 4)])
