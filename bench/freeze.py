"""Freezes what planning says: plans, schedules, programs and reports as text files, to compare two versions.

    python bench/freeze.py FOLDER [--models gpt2 t5] [--planners exact probe]
    diff -r FOLDER OTHER

Run it before and after a change that must not change results, each time into an empty folder outside the
repository. Costs are roofline figures, so two runs of one version give the same bytes. Refusals are frozen by
their class, as their wording may change. Takes about 8 minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import machine
import nets
from click.testing import CliRunner

import pipeloom
from pipeloom.cli import main as command_line
from pipeloom.ir.text import to_json
from pipeloom.planner.planners import PLANNERS
from pipeloom.schedules.registry import FAMILIES

CLUSTER = "4 x a100-40"
SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b", "zb_v", "gis", "po_f")
SIZES = ((2, 4), (4, 8), (3, 9), (8, 16))  # ranks and micro-batches of frozen schedules
DEAR = ("auto", "pipeoffload", "graphpipe")  # they try many schedules or shapes: one case each


def printed(*words: str) -> str:
    """What a command prints; a refusal as its exit status only."""
    result = CliRunner().invoke(command_line, words)
    error = result.exception
    if error is not None and not isinstance(error, (SystemExit, pipeloom.PipeloomError)):
        raise error
    return result.stdout if result.exit_code == 0 else f"refused with status {result.exit_code}\n"


def schedules() -> Iterator[tuple[str, str]]:
    """Rows, programs with their transfers, and explanations, by the names of their files."""
    for name in FAMILIES:
        for p, m in SIZES:
            case, words = f"schedules/{name}-{p}-{m}", (name, "-p", str(p), "-m", str(m))
            yield f"{case}.csv", printed("schedule", "export", *words)
            yield f"{case}.program.csv", printed("schedule", "export", *words, "--transfers")
            yield f"{case}.json", printed("schedule", "show", *words, "--json")
        yield f"schedules/{name}.explained", printed("schedule", "explain", name, "-p", "4", "-m", "8")


def report(model: str) -> str:
    """What `plan` and `simulate` print of a model: tables, drawing, limits and advice."""
    with TemporaryDirectory() as name:
        job, plan = Path(name) / "frozen_job.py", Path(name) / "plan.json"
        job.write_text(f"import nets\n\n\ndef job():\n    return nets.job({model!r})\n")
        where = (f"{job}:job", "--cluster", CLUSTER)
        text = printed("plan", *where, "-p", "4", "-o", str(plan)) + printed("simulate", str(plan), *where)
        return text.replace(name, "")


def plans(model: str, planners: list[str]) -> Iterator[tuple[str, str]]:
    """Plans with their predicted steps, without a cap and under one; a refusal by its class."""
    job = nets.job(model)
    how: dict[str, Any] = {"ranks": 4, "microbatches": 8, "microbatch_size": 2, "cluster": CLUSTER}
    how["captured"] = pipeloom.capture(job, 2)
    for planner, schedule, weights in product(planners, SCHEDULES, ("flush", "2bw")):
        if planner in DEAR and (schedule, weights) != (SCHEDULES[0], "flush"):
            continue
        name, how["memory"] = f"plans/{model}/{planner}-{schedule}-{weights}", None
        how |= {"planner": planner, "schedule": schedule, "weights": weights}
        try:
            plan = pipeloom.plan(job, **how)
            yield f"{name}.json", to_json(plan)
            name, how["memory"] = f"{name}-capped", int(max(plan.peaks) * 0.8)
            yield f"{name}.json", to_json(pipeloom.plan(job, **how))
        except pipeloom.PipeloomError as error:
            yield f"{name}.refused", f"{type(error).__name__}\n"


def main() -> int:
    parser = machine.parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=list(nets.NAMES), choices=nets.NAMES)
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), choices=PLANNERS)
    given = parser.parse_args()
    if given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"{given.folder} is not empty: old files would be mixed with new ones")
    of_models = (plans(model, given.planners) for model in given.models)
    reports = ((f"reports/{model}.txt", report(model)) for model in given.models)
    for name, text in chain(schedules(), *of_models, reports):
        file = given.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
