"""FlexPipe and Tessel (HPCA 2024): our search over schedules beside what Tessel's public code finds.

    python bench/flexpipe.py [--ranks 4 8] [--microbatches 16 64] [--split]

Shapes that Tessel searches, F = 1, B = 3, one unit of memory a micro-batch, no transfers
(tests/support/search_shapes.py). Tessel's figures are of its public code (zhiqi-0/Tessel, commit 44f72c3),
its orders timed again so that every block begins as early as it can; on 8 ranks it did not end within 150 s.
Our seconds are of the search alone, in one thread, its code compiled before.

Every result is proved by the checks and timed by the simulator.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from machine import parser_of, run_parts

# isort: split
from search_shapes import problem

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


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--split", action="store_true", help="I and W apart, each half of B")
    given = parser.parse_args()
    search_orders(problem("M", 2, 4, 3, split=True))  # loads the compiled code
    part = partial(shapes, given.ranks, given.microbatches, split=given.split)
    return run_parts(["shapes"], {"shapes": part})


if __name__ == "__main__":
    sys.exit(main())
