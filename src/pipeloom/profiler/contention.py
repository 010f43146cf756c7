"""How much longer ops take when several ranks of one machine compute at once.

Ranks share memory, caches and often the very cores: two threads of one core get each a good half of it. An op
that is measured alone is so too fast, and a plan made of such ops too short, by a fifth to a third on two
threads of one core. So a few kernels run alone and beside as many processes as there will be further ranks,
each of which runs the same kernel for as long as it is measured:

    this process   | alone |=====| beside |=====| alone |=====| ...      median of each, thread's own time
    other ranks    |       |     | kernel kernel kernel |     | ...

The factor of a kind of op is the second over the first, each in the round where it was shortest: what other
users of the machine take for a moment makes times longer, never shorter. What the scheduler gives to others
where there are more ranks than cores is not in a thread's own time, and counted as ranks / cores.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from time import perf_counter, thread_time

import torch

from ..ir.graph import OpGraph
from ..ir.profile import Profile
from .measure_op import torch_threads
from .measurement import usable_cores
from .rules import rule_of

PRODUCTS = ("matmul", "attention", "convolution")
"""Classes of ops that matrix products limit; memory and caches limit the others."""

ROUNDS, ROUND_S = 7, 0.08
"""How often each kernel runs alone and beside others, and for how long each time."""

REST = "rest"


@dataclass(frozen=True, kw_only=True)
class Contention:
    """How many times as long ops take beside other ranks as alone: matrix products, and the rest.

    Raises: ValueError for a factor below 1, or that is infinite or no number.
    """

    ranks: int
    products: float = 1.0
    others: float = 1.0

    def __post_init__(self) -> None:
        for factor in (self.products, self.others):
            if not 1.0 <= factor < inf:
                raise ValueError(f"contention makes ops {factor} times as slow")

    def of(self, target: str) -> float:
        """The factor of an op.

        >>> both = Contention(ranks=2, products=1.5, others=1.2)
        >>> both.of("aten.addmm.default"), both.of("aten.gelu.default")
        (1.5, 1.2)
        """
        kind = rule_of(target).kind
        return self.products if kind in PRODUCTS else self.others

    def slowed(self, profile: Profile, graph: OpGraph) -> Profile:
        """A profile of ops that ran alone, as they run beside the other ranks."""
        factors = {op.name: self.of(op.target) for op in graph.ops}
        costs = {name: profile.costs[name].scaled(factor, factor) for name, factor in factors.items()}
        told = f"beside {self.ranks - 1} more: products x{self.products:.3g}, others x{self.others:.3g}"
        return replace(profile, costs=dict(profile.costs) | costs, notes=(*profile.notes, told))


def measure_contention(ranks: int, *, clock: Callable[[], float] = thread_time) -> Contention:
    """Run kernels alone and beside `ranks - 1` processes; takes about as long as these take to start."""
    cores = usable_cores()
    sliced = max(1.0, ranks / cores)
    if ranks < 2:
        return Contention(ranks=ranks)
    beside = [_start() for _ in range(min(ranks, cores) - 1)]
    try:
        for process in beside:
            _answer(process)
        with torch_threads(1):
            factors = {name: sliced * _factor(name, beside, clock) for name in kernels()}
    finally:
        for process in beside:
            process.kill()
            process.communicate()
    return Contention(ranks=ranks, **factors)


def kernels() -> Mapping[str, Callable[[], object]]:
    """What runs, by the factor that it is for: a product of the size of a small layer's, and an activation of
    a few MiB."""
    a, b = torch.ones(512, 512), torch.ones(512, 512)
    x = torch.linspace(-1, 1, 1 << 20)
    return {"products": lambda: torch.mm(a, b), "others": lambda: torch.nn.functional.gelu(x)}


def _factor(name: str, beside: list[subprocess.Popen[str]], clock: Callable[[], float]) -> float:
    run = kernels()[name]
    run()
    alone: list[float] = []
    together: list[float] = []
    for _ in range(ROUNDS):
        alone.append(median(_times(run, clock)))
        for process in beside:
            _tell(process, name)
        together.append(median(_times(run, clock)))
        for process in beside:
            _tell(process, REST)
    return max(1.0, min(together) / max(min(alone), 1e-9))


def _times(run: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    until = perf_counter() + ROUND_S
    times: list[float] = []
    while not times or perf_counter() < until:
        start = clock()
        run()
        times.append(clock() - start)
    return times


def _start() -> subprocess.Popen[str]:
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeloom.profiler.contention"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _tell(process: subprocess.Popen[str], word: str) -> None:
    """Give a process another kernel, and wait until it has begun."""
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    _answer(process)


def _answer(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"a process that computes beside others ended with {process.wait()}")


def main() -> None:
    """Another rank: runs the kernel that standard input names, until it names another one, or ends."""
    torch.set_num_threads(1)
    known = dict(kernels()) | {REST: None}
    print(REST, flush=True)
    while word := sys.stdin.readline().strip():
        run = known[word]
        print(word, flush=True)
        while run is not None and not select.select([sys.stdin], [], [], 0)[0]:
            run()


if __name__ == "__main__":
    main()
