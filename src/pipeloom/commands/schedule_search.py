"""pipeloom schedule search: the fastest order within a limit, and a proof of how good it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..ir.errors import ConfigError
from ..ir.text import format_bytes, show_share, write_whole
from .common import FILE, NEW_FILE, Amount, emit, json_option
from .schedule import SHORTEST

if TYPE_CHECKING:
    from ..schedules.search.search import Progress as SearchProgress
    from ..schedules.search.search_schedule import FoundSchedule


@click.command()
@click.argument("stages", type=FILE, required=False)
@click.option("--times", type=FILE, help="Take stages, ranks, times and sizes from a saved plan instead.")
@click.option("--microbatches", "-m", type=click.IntRange(1), default=8, help="Micro-batches per step.")
@click.option("--ranks", "-p", type=click.IntRange(1, 4096), help="Ranks, where stages do not name theirs.")
@click.option(
    "--memory",
    default="",
    show_default=False,
    help="Most residuals of a rank, as 4 or 3GiB; or one per rank, as 4,4,3,3.",
)
@click.option(
    "--effort",
    type=Amount(0.01, 1000),
    default=1.0,
    help="By which the orders that are tried are multiplied.",
)
@click.option("--time-limit", type=Amount(0), help="Seconds after which the best so far is taken.")
@click.option("--operations", type=FILE, help="A Python file that declares operations, which are placed too.")
@SHORTEST
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the orders that are tried at random.")
@click.option("--output", "-o", type=NEW_FILE, help="File to write: .py, for any -m, or .txt, the rows.")
@json_option
def search(
    *,
    stages: Path | None,
    times: Path | None,
    microbatches: int,
    ranks: int | None,
    memory: str,
    effort: float,
    time_limit: float | None,
    operations: Path | None,
    shortest: str,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Search for the fastest order of the stages in STAGES, a TOML file, within a limit.

    \b
        transfer = 0.1
        [[stage]]
        F = 1.0
        B = 3.0            # or I = 1.5 and W = 1.5, which are then ordered apart
        bytes = 1          # of residuals of one micro-batch
        ranks = [0, 1]     # which run it together; one; or left out: searched
        after = []         # by name or number; left out: the stage before

    With the same seed the result is the same. Ctrl-C or --time-limit ends the search early: the best so far
    is written, and the exit status is 0. A .py file is a schedule of your own, for any number of
    micro-batches: pipeloom schedule show found.py:found. OR-tools (pip install pipeloom[search]) adds exact
    answers to small cases.
    """
    from ..schedules.search.search import SearchOptions
    from ..schedules.search.search_schedule import search_schedule

    if (stages is None) == (times is None):
        raise ConfigError("give a file of stages, or --times PLAN", hint="not both, not neither")
    if output is not None and output.suffix not in (".py", ".txt"):
        raise ConfigError(f"cannot write a schedule as {output}", hint="end the name in .py or .txt")
    found = search_schedule(
        stages or times or Path(),
        microbatches,
        memory=memory,
        ranks=ranks or 0,
        operations=operations,
        shortest=shortest,
        options=SearchOptions(
            effort=effort, time_limit_s=inf if time_limit is None else time_limit, seed=seed
        ),
        report=_progress_line(),
    )
    click.echo("\r\033[K" if sys.stderr.isatty() else "", nl=False, err=True)
    if output is not None:
        write_whole(output, found.text(str(output)))
    emit(found.figures(), _screen(found, output), as_json=as_json)


def _progress_line() -> Callable[[SearchProgress], None]:
    """Rewrites one line on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return lambda progress: None

    def show(progress: SearchProgress) -> None:
        pace = progress.evaluations / max(progress.seconds, 1e-9)
        line = (
            f"best {progress.cost_s:.6g}  bound {progress.bound.seconds:.6g}  gap "
            f"{show_share(progress.gap)}  {pace:,.0f} orders/s  {progress.engine}"
        )
        click.echo(f"\r\033[K{line}", nl=False, err=True)

    return show


def _screen(found: FoundSchedule, output: Path | None) -> Iterator[str]:
    progress, result = found.result.progress, found.result
    took, least = f"step {found.step_s:.6g}", "no order is faster than"
    if found.shortest == "span":
        took, least = f"longest span {found.span_s:.6g} ({took})", "no span is shorter than"
    yield (
        f"{took}, found by {result.best.engine} ({result.ended}: {progress.evaluations} "
        f"orders in {progress.seconds:.1f} s)"
    )
    yield (
        f"{least} {found.bound_s:.6g} ({progress.bound.name}: {progress.bound.why}); "
        f"gap {100 * found.gap:.2f} %"
    )
    if found.left_out:
        yield found.left_out
    size = format_bytes if result.problem.unit == 1 else "{:.4g}".format
    yield f"residuals per rank at most {' '.join(map(size, found.peaks))}"
    if output is None:
        yield str(found.schedule)
    else:
        repeats = f": {result.repeating.step_s:.6g} a step" if output.suffix == ".py" else ""
        yield f"written to {output}{repeats}"
