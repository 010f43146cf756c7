"""Freezes what planning says: plans, schedules, programs and reports as text files, to compare two versions.

    python bench/freeze.py FOLDER [--models gpt2 t5] [--planners exact probe]
    diff -r FOLDER OTHER

Run it on the code before and after a change that must not change results, each time into an empty folder
outside the repository. Costs are roofline figures, so two runs of one version give the same bytes. Refusals
are frozen by their class, as their wording may change. Takes about 8 minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pipeloom

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import zoo  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from pipeloom import Job, PipeloomError, Plan  # noqa: E402
from pipeloom.cli import main as command_line  # noqa: E402
from pipeloom.ir.text import to_json  # noqa: E402
from pipeloom.planner.planners import names as planner_names  # noqa: E402
from pipeloom.schedules.registry import FAMILIES  # noqa: E402

CLUSTER = "4 x a100-40"
SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b", "zb_v", "gis", "po_f")
SIZES = ((2, 4), (4, 8), (3, 9), (8, 16))
"""Ranks and micro-batches of frozen schedules."""

WEIGHTS = ("flush", "2bw")
DEAR = ("auto", "pipeoffload", "graphpipe")
"""Planners that try many schedules or shapes: one schedule each, without a cap and with one."""


def main(folder: Path, models: list[str], planners: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: what was frozen before would be mixed with what is now")
    for name, text in frozen_schedules():
        write(folder / "schedules" / name, text)
    for model in models:
        for name, text in frozen_plans(model, planners):
            write(folder / "plans" / model / name, text)
        write(folder / "reports" / f"{model}.txt", frozen_report(model))
    print(f"{sum(1 for path in folder.rglob('*') if path.is_file())} files in {folder}")
    return 0


def frozen_schedules() -> Iterator[tuple[str, str]]:
    """Rows, and programs with their transfers, of every schedule of the library."""
    for schedule in FAMILIES:
        for ranks, microbatches in SIZES:
            size = ["-p", str(ranks), "-m", str(microbatches)]
            case = f"{schedule}-{ranks}-{microbatches}"
            yield f"{case}.csv", printed("schedule", "export", schedule, *size)
            yield f"{case}.program.csv", printed("schedule", "export", schedule, "--transfers", *size)
            yield f"{case}.json", printed("schedule", "show", schedule, "--json", *size)
        yield f"{schedule}.explained", printed("schedule", "explain", schedule, "-p", "4", "-m", "8")


def frozen_report(model: str) -> str:
    """What `plan` and `simulate` print of a model: tables, drawing, limits and advice."""
    with TemporaryDirectory() as name:
        job, plan = Path(name) / "frozen_job.py", Path(name) / "plan.json"
        job.write_text(f"import zoo\n\n\ndef job():\n    return zoo.job({model!r})\n")
        where = ("--cluster", CLUSTER)
        planned = printed("plan", f"{job}:job", "-p", "4", "-o", str(plan), *where)
        simulated = printed("simulate", str(plan), f"{job}:job", *where)
        return (planned + simulated).replace(name, "")


def printed(*arguments: str) -> str:
    """What a command prints; a refusal as its exit status only."""
    result = CliRunner().invoke(command_line, arguments)
    if result.exception is not None and not isinstance(result.exception, (SystemExit, PipeloomError)):
        raise result.exception
    return result.stdout if result.exit_code == 0 else f"refused with status {result.exit_code}\n"


def frozen_plans(model: str, planners: list[str]) -> Iterator[tuple[str, str]]:
    """Plans of one model as JSON, and what their simulated steps take, uncapped and under a cap."""
    job = zoo.job(model)
    captured = pipeloom.capture(job, 2)
    for planner in planners:
        for schedule in SCHEDULES[:1] if planner in DEAR else SCHEDULES:
            for weights in WEIGHTS[:1] if planner in DEAR else WEIGHTS:
                case = f"{planner}-{schedule}-{weights}"
                options = {"schedule": schedule, "planner": planner, "weights": weights}
                yield from plans_of_case(case, job, captured, options)


def plans_of_case(
    case: str, job: Job, captured: object, options: dict[str, str]
) -> Iterator[tuple[str, str]]:
    free = plan_or_refusal(job, captured, options)
    if not isinstance(free, Plan):
        yield f"{case}.refused", f"{free}\n"
        return
    yield f"{case}.json", to_json(free)
    cap = int(max(free.peaks) * 0.8)
    capped = plan_or_refusal(job, captured, options, memory=cap)
    text = to_json(capped) if isinstance(capped, Plan) else f"{capped}\n"
    yield f"{case}-capped.json", text


def plan_or_refusal(job: Job, captured: object, options: dict[str, str], **more: int) -> Plan | str:
    try:
        return pipeloom.plan(
            job,
            ranks=4,
            microbatches=8,
            microbatch_size=2,
            cluster=CLUSTER,
            captured=captured,
            **options,
            **more,
        )
    except PipeloomError as error:
        return type(error).__name__


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=list(zoo.NAMES), choices=zoo.NAMES)
    parser.add_argument("--planners", nargs="+", default=list(planner_names()), choices=planner_names())
    given = parser.parse_args()
    sys.exit(main(given.folder, given.models, given.planners))
