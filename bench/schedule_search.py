"""Schedule search on the shapes that Tessel (HPCA 2024) searches, beside what its public code finds.

    python bench/schedule_search.py [--ranks 4 8] [--microbatches 16 64] [--split]
    python bench/schedule_search.py --chains [--ranks 4 8 16 32]
    python bench/schedule_search.py --growing 200 [--minutes 7]

F = 1, B = 3, one unit of memory a micro-batch, no transfers: tests/support/search_shapes.py. Tessel's figures
are of its public code (zhiqi-0/Tessel, commit 44f72c3), its orders timed again so that every block begins as
early as it can; on 8 ranks it did not end within 150 s. What counts as our seconds is the search alone, of
one process of one thread, its compiled code loaded before. Every result is proved by the checks and timed by
the simulator.
With --chains: chains with split backwards, stages of three kinds of times, 4 micro-batches per rank, beside
the schedules of the library that are made for them, at the memory that these take.

With --growing: so many random chains, see tests/support/random_problems.py, each with its limit, 1.5 times
and twice as much: whether a step is ever longer than the best of the library within the limit, or than with
less memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from machine import print_stamp, print_table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from random_problems import random_chain
from search_shapes import TIMES, chain_of, problem

from pipeloom.schedules.search.library import fitting, library_order
from pipeloom.schedules.search.search import SearchOptions, search_orders
from pipeloom.schedules.search.search_schedule import prove_search

TESSEL: dict[tuple[int, str, int], tuple[float | None, float | None]] = {
    (4, "V", 4): (76.0, 268.0),
    (4, "X", 4): (138.0, 522.0),
    (4, "M", 6): (108.0, 396.0),
    (4, "NN", 6): (140.0, 524.0),
    (4, "NN", 20): (148.0, 532.0),
    (4, "K", 3): (103.0, 391.0),
    (4, "K", 6): (100.0, 388.0),
    (8, "V", 8): (None, None),
    (8, "K", 12): (None, None),
    (8, "X", 16): (None, None),
    (8, "M", 20): (None, None),
    (8, "NN", 20): (None, None),
}
"""(ranks, shape, cap) -> its steps with 16 and 64 micro-batches."""

COUNTS = (16, 64)

CHAINS = {"zb_1p": 1, "zb_v": 2, "v_half": 2, "gis": 4}
"""Schedule -> its stages per rank."""


def measure(ranks: int, shape: str, cap: int, microbatches: int, *, split: bool) -> dict[str, Any]:
    """One search, proved and simulated."""
    asked = problem(shape, ranks, microbatches, cap, split=split)
    before, cpu = time.perf_counter(), time.process_time()
    result = search_orders(asked, SearchOptions())
    seconds, cpu = time.perf_counter() - before, time.process_time() - cpu
    step_s = prove_search(result).step_s
    assert abs(step_s - result.best.step_s) < 1e-6 * step_s, "the simulator disagrees"
    tessel = TESSEL[ranks, shape, cap][COUNTS.index(microbatches)] if microbatches in COUNTS else None
    return {
        "ranks": ranks,
        "shape": shape,
        "cap": cap,
        "microbatches": microbatches,
        "split": split,
        "step": step_s,
        "repeating": result.repeating.step_s,
        "bound": result.progress.bound.seconds,
        "bound_why": result.progress.bound.why,
        "engine": result.best.engine,
        "orders": result.progress.evaluations,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "tessel": None if split else tessel,
    }


def measure_chain(ranks: int, schedule: str, times: str) -> dict[str, Any]:
    """A search at the memory of a schedule of the library, and that schedule."""
    free = chain_of(schedule, ranks, CHAINS[schedule], times)
    known = library_order(free, schedule)
    assert known is not None
    asked = chain_of(schedule, ranks, CHAINS[schedule], times, cap=max(known.peaks))
    before, cpu = time.perf_counter(), time.process_time()
    result = search_orders(asked, SearchOptions())
    seconds, cpu = time.perf_counter() - before, time.process_time() - cpu
    step_s, busy_s = prove_search(result).step_s, asked.microbatches * max(asked.work)
    return {
        "ranks": ranks,
        "schedule": schedule,
        "times": times,
        "microbatches": asked.microbatches,
        "cap": max(known.peaks) / CHAINS[schedule],
        "library_bubble": 1 - busy_s / known.step_s,
        "bubble": 1 - busy_s / step_s,
        "engine": result.best.engine,
        "orders": result.progress.evaluations,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
    }


GROWN = (1.0, 1.5, 2.0)
"""Limits of a random chain, of its own."""

GROWING_EFFORT = 0.2


def measure_growing(seed: int) -> dict[str, Any]:
    """One random chain with growing limits: per limit the step, its engine and the best of the library."""
    free = random_chain(seed)
    cases: list[dict[str, Any]] = []
    before = time.process_time()
    for share in GROWN:
        asked = replace(free, caps=tuple(share * cap for cap in free.caps))
        result = search_orders(asked, SearchOptions(effort=GROWING_EFFORT))
        known = [library_order(asked, name) for name in fitting(asked)]
        cases.append(
            {
                "step": result.best.step_s,
                "library": min((k.step_s for k in known if k is not None), default=inf),
                "engine": result.best.engine,
            }
        )
        if result.ended == "optimal":
            break  # no limit makes it shorter
    return {
        "seed": seed,
        "ranks": free.ranks,
        "stages": len(free.stages),
        "microbatches": free.microbatches,
        "cases": cases,
        "cpu_seconds": round(time.process_time() - before, 2),
    }


def print_shapes(ranks: list[int], counts: list[int], *, split: bool) -> None:
    print_table(
        [
            measure(count, shape, cap, m, split=split)
            for count, shape, cap in TESSEL
            for m in counts
            if count in ranks
        ]
    )


def print_chains(ranks: list[int]) -> None:
    print_table([measure_chain(p, schedule, times) for p in ranks for schedule in CHAINS for times in TIMES])


def print_growing(count: int, minutes: float) -> None:
    """As many chains as there is time for, and what is wrong with any."""
    ends = time.monotonic() + 60 * minutes
    done, pairs, behind, longer = 0, 0, 0, []
    for seed in range(count):
        if time.monotonic() > ends:
            break
        case = measure_growing(seed)
        steps = [one["step"] for one in case["cases"]]
        done, pairs = done + 1, pairs + len(steps) - 1
        behind += sum(one["step"] > one["library"] * (1 + 1e-9) for one in case["cases"])
        for at in range(1, len(steps)):
            more = steps[at] / min(steps[:at]) - 1
            if more > 1e-9:
                longer.append(more)
                print(f"chain {seed}: {100 * more:.3f} % longer with {GROWN[at]:g} of its limit", flush=True)
    print(
        f"{done} chains: {behind} searches behind the library; {len(longer)} of {pairs} larger limits longer"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[])
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--split", action="store_true", help="I and W apart, each half of B")
    parser.add_argument("--chains", action="store_true", help="chains beside schedules of the library")
    parser.add_argument("--growing", type=int, default=0, help="random chains, each with growing limits")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further one is begun")
    args = parser.parse_args()
    print_stamp()
    search_orders(problem("M", 2, 4, 3, split=True))  # loads the compiled code
    if args.growing:
        print_growing(args.growing, args.minutes)
    elif args.chains:
        print_chains(args.ranks or [4, 8, 16, 32])
    else:
        print_shapes(args.ranks or [4, 8], args.microbatches, split=args.split)


if __name__ == "__main__":
    main()
