"""Schedule search on the shapes that Tessel (HPCA 2024) searches, beside what its public code finds.

    python bench/schedule_search.py [--ranks 4 8] [--microbatches 16 64] [--split] [--again]

F = 1, B = 3, one unit of memory a micro-batch, no transfers; see bench/search_shapes.py. Tessel's figures
are of its public code (zhiqi-0/Tessel, commit 44f72c3), its orders timed again so that every block begins as
early as it can; on 8 ranks it did not end within 150 s. What counts as our seconds is the search alone, of
one process of one thread, its compiled code loaded before. Every result is proved by the checks and timed by
the simulator. The file of results is written after every case; a case that is in it is not measured again
without `--again`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from machine import code_of, describe_machine
from search_shapes import problem

from pipeloom.api import prove_search
from pipeloom.schedules import SearchOptions, search_orders

RESULTS = Path(__file__).parent / "results" / "schedule_search.json"
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


def line(case: dict[str, Any]) -> str:
    tessel = "-" if case["tessel"] is None else f"{case['tessel']:g}"
    name = f"{case['shape']}{' split' if case['split'] else ''}"
    gap = 100 * (case["step"] / case["bound"] - 1)
    return (
        f"{case['ranks']:5} {name:9} {case['cap']:4} {case['microbatches']:4} {case['step']:8.6g} "
        f"{case['bound']:8.6g} {gap:6.1f} % {tessel:>7} {case['seconds']:8.2f} {case['cpu_seconds']:8.2f}  "
        f"{case['engine']}"
    )


def key_of(case: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(case[k] for k in ("ranks", "shape", "cap", "microbatches", "split"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--split", action="store_true", help="I and W apart, each half of B")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    code = code_of(("schedules",))
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": []}
    cases = {key_of(case): case for case in old["cases"]}
    search_orders(problem("M", 2, 4, 3, split=True))  # loads the compiled code
    print("ranks shape      cap    m     step    bound      gap  tessel  seconds      cpu  engine")
    for ranks, shape, cap in TESSEL:
        if ranks not in args.ranks:
            continue
        for count in args.microbatches:
            key = (ranks, shape, cap, count, args.split)
            if args.again or cases.get(key, {}).get("code") != code:
                case = measure(ranks, shape, cap, count, split=args.split)
                cases[key] = case | {"code": code}
                kept = {"machine": describe_machine(), "cases": list(cases.values())}
                RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
            print(line(cases[key]), flush=True)


if __name__ == "__main__":
    main()
