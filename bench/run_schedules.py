"""Every schedule of the library trains the default byte-level GPT on real gloo processes: how far from one?

    python bench/run_schedules.py [--ranks 2 4] [--dtypes float64 float32] [--width 2 [--shard-optimizer]]

The model is small (2 blocks, width 32), so that the ranks fit two cores. Each schedule runs two steps of SGD
with momentum and one evaluation; the largest relative differences of losses, gradients of the last step,
updated parameters and evaluation loss from plain PyTorch in one process are recorded. Schedules that the
runtime cannot run are listed with what they lack. Bidirectional ones hold every stage on two ranks; that
the replicas' gradients and parameters are equal to the last bit is checked on the way. With --width W so many
pipelines of as many ranks train side by side; two-way schedules, with replicas of their own, are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from machine import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from every_schedule import LACKING, SYNCHRONOUS  # noqa: E402
from schedule_ranks import compare_each  # noqa: E402

from pipeloom import schedules  # noqa: E402
from pipeloom.runtime.launch import launch  # noqa: E402

RESULTS = Path(__file__).parent / "results"
TOLERANCES = {"float64": 1e-12, "float32": 1e-4}


def main(ranks: list[int], dtypes: list[str], *, width: int, shard: bool, record: bool) -> int:
    names, runs = ["forward_only", *SYNCHRONOUS], []
    if width > 1:
        names = [name for name in names if schedules.entry(name).place != "both ways"]
    for count in ranks:
        for dtype in dtypes:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "differences.json"
                if (
                    launch(
                        compare_each,
                        count * width,
                        args=(names, 2 * count * width, dtype, file, width, shard),
                    )
                    != 0
                ):
                    return 1
                table = json.loads(file.read_text())
            worst = max(max(found.values()) for found in table.values())
            runs.append(
                {
                    "ranks": count * width,
                    "width": width,
                    "shard_optimizer": shard,
                    "microbatches": 2 * count * width,
                    "dtype": dtype,
                    "worst": worst,
                    "passed": worst <= TOLERANCES[dtype],
                    "schedules": table,
                }
            )
            print(f"{count} ranks, {dtype}: largest difference {worst:.2e}", flush=True)
            for name, found in table.items():
                print(f"  {name:<18}" + "  ".join(f"{what} {d:.1e}" for what, d in found.items()))
    refused = {name: schedules.entry(name).lacks for name in LACKING}
    result = {"machine": describe_machine(), "tolerances": TOLERANCES, "runs": runs, "refused": refused}
    if record:
        name = "run_schedules" if width == 1 else f"run_schedules_width_{width}{'_sharded' if shard else ''}"
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(run["passed"] for run in runs) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCES), choices=list(TOLERANCES))
    parser.add_argument("--width", type=int, default=1, help="pipelines side by side, each of so many ranks")
    parser.add_argument("--shard-optimizer", action="store_true")
    parser.add_argument("--no-record", action="store_true", help="leave the recorded results as they are")
    arguments = parser.parse_args()
    sys.exit(
        main(
            arguments.ranks,
            arguments.dtypes,
            width=arguments.width,
            shard=arguments.shard_optimizer,
            record=not arguments.no_record,
        )
    )
