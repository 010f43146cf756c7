"""Machine code for a planner's loops, made on another core while a large model is captured.

Making it takes up to a minute, once per installation; planning itself takes less. Which kernels a search
calls, and for which types, only a search shows. So a process of its own plans a small model, in which every
kernel of the planner is compiled at once, and `ir.kernels` keeps what it has made for all processes. As a
program it is that process:

    python -m pipeloom.api.compiling STRATEGY [TREATMENT ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ..clusters import find_cluster
from ..ir.graph import Op, OpGraph, Parameter, Value
from ..ir.memory_policy import Treatment
from ..planner import PlanOptions, make_plan, planner
from ..planner.stage_cost import liveness as sweep
from ..profiler import roofline

AFTER_S = 5.0
"""Seconds of capturing after which a model is taken for one whose search will run compiled."""

LIMIT_S = 120.0
"""Seconds that a search waits for the code at most."""


@contextmanager
def made_beside(strategy: str, treatments: Sequence[Treatment] | None = None) -> Iterator[Callable[[], None]]:
    """Around the capture of a model that this planner is to cut: has the code made if that takes long.

    Yields: a function that waits until the code is there. What is not waited for ends with the block.
    A planner that does not treat residuals needs little code, and a machine with one core gains nothing: then
    nothing is started.
    """
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-P", "-m", __name__, strategy, *(treatments or ())]
    timer = threading.Timer(AFTER_S, lambda: started.append(_start(command)))
    treats = planner(strategy).optimises == "always" if treatments is None else bool(treatments)
    if treats and _cores() > 1:
        timer.start()

    def wait() -> None:
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)

    try:
        yield wait
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        for process in started:
            process.kill()
            process.wait()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make(strategy: str, treatments: Sequence[Treatment] | None = None) -> None:
    """Compile all that a search by this planner calls, in this process, which plans nothing else.

    Does nothing where machine code cannot be kept.
    """
    if not sweep._sweeps.kept:
        return
    sweep.COMPILE_AFTER = sweep.MADE_AFTER = 0
    graph = small_model()
    options = PlanOptions(treatments=None if treatments is None else tuple(treatments))
    for cap in CAPS:
        cluster = find_cluster(f"2 x a100-40 with {cap}")
        make_plan(
            graph,
            roofline(graph, cluster.devices[0]),
            cluster,
            stages=2,
            schedule="1f1b",
            microbatches=4,
            strategy=strategy,
            explained=False,
            options=options,
        )


ROWS, WIDTH, LAYERS = 512, 1024, 6


def small_model() -> OpGraph:
    """A chain of perceptrons with residual connections, 4 ops per layer: all that kernels tell apart."""
    ops: list[Op] = []
    params: list[Parameter] = []
    shape = (ROWS, WIDTH)

    def op(name: str, target: str, *inputs: str, weight: bool = False) -> str:
        value = Value(name=name, shape=shape, dtype="float32", needs_grad=True)
        owned = (f"{name}.weight",) if weight else ()
        params.extend(Parameter(name=p, shape=(WIDTH, WIDTH), dtype="float32") for p in owned)
        ops.append(Op(name=name, target=target, inputs=inputs, outputs=(value,), params=owned, module=""))
        return name

    x = op("embed", "aten.linear.default", "x", weight=True)
    for k in range(LAYERS):
        up = op(f"up{k}", "aten.linear.default", x, weight=True)
        act = op(f"act{k}", "aten.gelu.default", up)
        down = op(f"down{k}", "aten.linear.default", act, weight=True)
        x = op(f"add{k}", "aten.add.Tensor", x, down)
    ops.append(
        Op(
            name="loss",
            target="aten.mean.default",
            inputs=(x,),
            module="",
            params=(),
            outputs=(Value(name="loss", shape=(), dtype="float32", needs_grad=True),),
        )
    )
    return OpGraph(
        name="small",
        inputs=(Value(name="x", shape=shape, dtype="float32"),),
        ops=tuple(ops),
        parameters=tuple(params),
        buffers=(),
        loss="loss",
    )


CAPS = ("170MiB", "160MiB", "150MiB")
"""Memory per device: what the small model needs where all residuals are kept, and less."""

if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2:] or None)  # type: ignore[arg-type]  # as `made_beside` passed them
