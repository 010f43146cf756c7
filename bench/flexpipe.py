"""FlexPipe and Tessel (HPCA 2024): our search over schedules beside what Tessel's public code finds.

    python bench/flexpipe.py shapes [--ranks 4 8] [--microbatches 16 64] [--split]
    python bench/flexpipe.py chains [--ranks 4 8 16 32]

shapes   those that Tessel searches, F = 1, B = 3, one unit of memory a micro-batch, no transfers
         (tests/support/search_shapes.py). Tessel's figures are of its public code (zhiqi-0/Tessel, commit
         44f72c3), its orders timed again so that every block begins as early as it can; on 8 ranks it did not
         end within 150 s. Our seconds are of the search alone, in one thread, its code compiled before.
chains   with split backwards, stages of three kinds of times, 4 micro-batches per rank, beside the schedules
         of the library that are made for them, at the memory that these take

Every result is proved by the checks and timed by the simulator.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from machine import parser_of, run_parts

# isort: split
from search_shapes import TIMES, chain_of, library_order, problem

from pipeloom.schedules.search.problem import SearchProblem
from pipeloom.schedules.search.search import SearchOptions, SearchResult, search_orders
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


def timed_search(asked: SearchProblem) -> tuple[SearchResult, dict[str, Any]]:
    """A search, proved and simulated; its step, engine and seconds."""
    begin, cpu = time.perf_counter(), time.process_time()
    result = search_orders(asked, SearchOptions())
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    step_s = prove_search(result).step_s
    assert abs(step_s - result.best.step_s) < 1e-6 * step_s, "the simulator disagrees"
    row = {"step": step_s, "engine": result.best.engine, "orders": result.progress.evaluations}
    return result, {**row, "seconds": seconds, "cpu_seconds": cpu}


def shapes(ranks: list[int], counts: list[int], *, split: bool) -> list[dict[str, Any]]:
    rows = []
    for (p, shape, cap), m in ((key, m) for key in TESSEL for m in counts if key[0] in ranks):
        result, row = timed_search(problem(shape, p, m, cap, split=split))
        bound, repeating = result.progress.bound, result.repeating.step_s
        tessel = None if split or m not in COUNTS else TESSEL[p, shape, cap][COUNTS.index(m)]
        case = {"ranks": p, "shape": shape, "cap": cap, "microbatches": m, "tessel": tessel}
        rows.append({**case, **row, "repeating": repeating, "bound": bound.seconds, "why": bound.why})
    return rows


def chains(ranks: list[int]) -> list[dict[str, Any]]:
    """Searches at the memory of a schedule of the library, and that schedule."""
    rows = []
    for p, (schedule, chunks), times in ((p, s, t) for p in ranks for s in CHAINS.items() for t in TIMES):
        known = library_order(chain_of(schedule, p, chunks, times), schedule)
        assert known is not None
        asked = chain_of(schedule, p, chunks, times, cap=max(known.peaks))
        _, row = timed_search(asked)
        busy_s = asked.microbatches * max(asked.work)
        case = {"ranks": p, "schedule": schedule, "times": times, "cap": max(known.peaks) / chunks}
        bubbles = {"library_bubble": 1 - busy_s / known.step_s, "bubble": 1 - busy_s / row["step"]}
        rows.append({**case, **bubbles, **row})
    return rows


def main() -> int:
    parser = parser_of(__doc__, ("shapes", "chains"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[])
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--split", action="store_true", help="I and W apart, each half of B")
    given = parser.parse_args()
    search_orders(problem("M", 2, 4, 3, split=True))  # loads the compiled code
    parts = {
        "shapes": lambda: shapes(given.ranks or [4, 8], given.microbatches, split=given.split),
        "chains": lambda: chains(given.ranks or [4, 8, 16, 32]),
    }
    return run_parts(given.parts, parts)


if __name__ == "__main__":
    sys.exit(main())
