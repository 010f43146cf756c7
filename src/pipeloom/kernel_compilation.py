"""Machine code for the kernels of a planner, made on another core while a large model is captured.

Compiling them takes half a minute, once per installation: about as long as capturing a model that is large
enough for them to run compiled. A process of its own plans a small model, in which they do so from the start,
and numba's cache keeps the code for all processes. Whatever happens to it, the search compiles what it does
not find.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from .caches import cache_folder, cache_key, keep
from .clusters.names import find_cluster
from .ir.errors import InfeasibleError
from .ir.graph import Op, OpGraph, Parameter, Value
from .ir.kernels import code_is_kept, compile_at_once
from .ir.memory_policy import Treatment
from .ir.plan import Plan
from .planner.planners import make_plan, planner
from .planner.request import PlanOptions
from .profiler.measurement import usable_cores
from .profiler.roofline import roofline

AFTER_S = 3.0
"""Seconds of capturing after which a model is taken for one whose search may run compiled."""

LARGE_OPS = 1000
"""Ops of a graph whose search takes longer than compiling what it calls."""

LIMIT_S = 60.0
"""Seconds that a search waits for the code at most."""

PARENT_ENDED = 75
"""Exit status of the process when the one that started it has ended."""

ROWS, WIDTH, LAYERS, MEMORY = 512, 1024, 6, ("170MiB", "150MiB")
"""Of the small model, and of devices for it: in the second residuals must be freed."""

CODE = f"import time; time.sleep({AFTER_S}); from {__name__} import main; main()"
"""What the process runs: before it loads anything it waits, so that a short capture ends it first."""


@contextmanager
def kernels_compiled_beside(
    name: str, treatments: tuple[Treatment, ...] | None = None
) -> Iterator[Callable[[OpGraph], None]]:
    """Around the capture of a model that this planner is to cut: has the code made if that takes long.

    Yields: a function that waits until the code is there, for a graph that large. What is not waited for ends
    with the block. Nothing is started if that was done before, for a planner that treats no residuals, which
    needs little code, and on a machine with one core.
    """
    process: subprocess.Popen[bytes] | None = None
    treats = planner(name).optimises == "always" if treatments is None else bool(treatments)
    if treats and usable_cores() > 1 and not _note(name, treatments).exists():
        command = [sys.executable, "-P", "-c", CODE, name, *(treatments or ())]
        nothing = subprocess.DEVNULL
        with suppress(OSError):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing)

    def wait(graph: OpGraph) -> None:
        if process is not None and len(graph.ops) >= LARGE_OPS:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)

    try:
        yield wait
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def main() -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    compile_kernels_for(sys.argv[1], tuple(sys.argv[2:]) or None)  # type: ignore[arg-type]  # as given above


def _end_with_parent() -> None:
    """End this process when the parent has ended, which closes the pipe in any case."""
    os.read(0, 1)
    os._exit(PARENT_ENDED)


def _note(name: str, treatments: tuple[Treatment, ...] | None) -> Path:
    package = Path(__file__).parent
    newest = max(file.stat().st_mtime_ns for file in package.rglob("*.py"))
    where = (platform.node(), package, os.environ.get("NUMBA_CACHE_DIR"))
    return cache_folder("kernels") / cache_key(*where, newest, sys.version, name, *(treatments or ()))


def compile_kernels_for(name: str, treatments: tuple[Treatment, ...] | None = None) -> None:
    note = _note(name, treatments)
    if code_is_kept():
        compile_at_once()
        for memory in MEMORY:
            with suppress(InfeasibleError):  # with some treatments the small model does not fit: go without
                plan_small(name, memory, treatments)
    keep(note, "")


def plan_small(name: str, memory: str, treatments: tuple[Treatment, ...] | None = None) -> Plan:
    graph, cluster = small_model(), find_cluster(f"2 nodes of 1 x a100-40 with {memory}")
    options = PlanOptions(microbatches=4, planner=name, treatments=treatments)
    return make_plan(graph, roofline(graph, cluster.devices[0]), cluster, options, explained=False)


def small_model() -> OpGraph:
    """A chain of perceptrons with residual connections: all that kernels tell apart."""
    ops = [_op("x0", "linear.default", "x")]
    for k in range(LAYERS):
        ops += (
            _op(f"up{k}", "linear.default", f"x{k}"),
            _op(f"act{k}", "gelu.default", f"up{k}"),
            _op(f"down{k}", "linear.default", f"act{k}"),
            _op(f"x{k + 1}", "add.Tensor", f"x{k}", f"down{k}"),
        )
    ops.append(_op("loss", "mean.default", f"x{LAYERS}", shape=()))
    weights = [Parameter(name=p, shape=(WIDTH, WIDTH), dtype="float32") for op in ops for p in op.params]
    return OpGraph(
        name="small",
        inputs=(Value(name="x", shape=(ROWS, WIDTH), dtype="float32"),),
        ops=tuple(ops),
        parameters=tuple(weights),
        buffers=(),
        loss="loss",
    )


def _op(name: str, target: str, *inputs: str, shape: tuple[int, ...] = (ROWS, WIDTH)) -> Op:
    return Op(
        name=name,
        target=f"aten.{target}",
        inputs=inputs,
        outputs=(Value(name=name, shape=shape, dtype="float32", needs_grad=True),),
        params=(f"{name}.weight",) if target == "linear.default" else (),
        module="",
    )
