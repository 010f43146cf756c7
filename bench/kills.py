"""How long the other ranks of a run live on when one of them gets SIGKILL, and whether the run then resumes.

    python bench/kills.py [--kills 10] [--cases flush 2bw 2bw-width-2]

Ranks, moments and the comparison of the losses after `train --resume` are those of `tests/test_kills.py`. For
each kill the seconds from the signal to the end of all processes are recorded, the launcher included.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe_machine

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "support")]
import test_kills as kills_of  # noqa: E402

RESULT = Path(__file__).parent / "results" / "kills.json"
LIMIT_S = 10.0
CASES = {"flush": ("flush", 1), "2bw": ("2bw", 1), "2bw-width-2": ("2bw", 2)}


class TimedRun(kills_of.Run):
    """A run of which `ended_s` tells how long all took to end after the kill."""

    ended_s: list[float] = []
    keep: Callable[[], None]

    def wait(self) -> int:
        status = super().wait()
        if status == 128 + signal.SIGKILL:
            self.ended_s.append(round(self.took_s, 2))
            print(f"  kill {len(self.ended_s)}: all ended after {self.took_s:.2f} s", flush=True)
            self.keep()
        return status


def measure(name: str, count: int) -> None:
    """Kill, resume and compare; what is known is written after each kill.

    Raises: AssertionError if a run does not say who was killed, or resumes to other losses.
    """
    weights, width = CASES[name]
    ranks = kills_of.RANKS * width
    TimedRun.ended_s = ended_s = []

    def keep(**more: Any) -> None:
        result = json.loads(RESULT.read_text()) if RESULT.exists() else {"cases": {}}
        result["cases"][name] = {
            "weights": weights,
            "width": width,
            "ranks": ranks,
            "ended_s": ended_s,
            "median_s": round(statistics.median(ended_s), 2),
            "within_10_s": sum(took <= LIMIT_S for took in ended_s),
            **more,
            "machine": describe_machine(),
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")

    TimedRun.keep = staticmethod(keep)
    with tempfile.TemporaryDirectory() as folder:
        made = kills_of.folder_for(weights, Path(folder), width)
        moments = kills_of.kill_often(made, count, seed=17, ranks=ranks)
    keep(moments=moments, losses_after_resume="equal")
    print(f"  {sum(took <= LIMIT_S for took in ended_s)} of {count} within {LIMIT_S:g} s", flush=True)


def main(cases: list[str], count: int) -> None:
    kills_of.Run = TimedRun  # type: ignore[misc]
    for name in cases:
        print(name, flush=True)
        measure(name, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    main(arguments.cases, arguments.kills)
