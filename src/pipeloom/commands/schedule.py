"""pipeloom schedule: list, show, check, compare, explain and export schedules, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..ir.errors import ConfigError, PipeloomError, PlanError, ScheduleError
from ..ir.weight_policy import Updates
from .common import FILE, NEW_FILE, console, json_option, new_table, print_json
from .schedule_options import TIMES_HELP, refuse_shape, shape_options, updates_options

if TYPE_CHECKING:
    from ..schedules.scenario import Scenario, SimulatedSchedule

NAME_HELP = "NAME is one of `pipeloom schedule list`; options follow a colon, as in gis_g:group=3."
MOST_LINES = 60
"""A drawing goes on below itself up to so many lines, so that micro-batches have room for their numbers."""

SHOWN = 3
"""Sources that `explain` prints under each reason."""


@click.group()
def schedule() -> None:
    """List, draw, check, compare, explain and export pipeline schedules, without a model."""


@schedule.command("list")
@json_option
def list_them(*, as_json: bool) -> None:
    """Print the schedules of the library, with the names that torch, Megatron-LM and papers have for them.

    With --json: name -> about, place, lacks, aliases.
    """
    from ..schedules.scenario import library

    entries = library()
    if as_json:
        print_json(entries)
        return
    for name, entry in entries.items():
        lacks = f" (shown only: running it needs {entry['lacks']})" if entry["lacks"] else ""
        click.echo(f"{name:<18} {entry['about']}{lacks}")
        if entry["aliases"]:
            click.echo(f"{'':<18} also: {', '.join(entry['aliases'])}")
    click.echo(
        "\nF: forward, I: input gradient, W: weight gradient, B: I and W as one. A word in `` is an option, "
        "written\nbehind a colon: pipeloom schedule show gis_g:group=3. Schedules with several stages on "
        "each rank have `v`,\nhow many: pipeloom schedule compare interleaved:v=2 interleaved:v=4"
    )


@schedule.command(epilog=f"{NAME_HELP} {TIMES_HELP}")
@click.argument("name")
@shape_options
@updates_options
@click.option("--html", type=NEW_FILE, help="Write a page: the drawing, the reason for each gap, and memory.")
@click.option("--trace", type=NEW_FILE, help="Write a trace for Perfetto or chrome://tracing.")
@json_option
def show(
    *,
    name: str,
    scenario: Scenario,
    updates: Updates | None,
    html: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Draw the schedule NAME.

    With --json: name, ranks, stages, microbatches, step_s, bubble (idle share of rank-time until the last
    rank ends), span_s (longest time from a rank's first action to its last), span_bubble (idle share of
    that), peak (most micro-batches of residuals on a rank), peak_bytes (null where sizes are not known),
    by_rank: a list of rank, busy_s, bubble, peak; rows: one line of actions per rank; and weights (null for
    one version): policy, update_every, and per stage versions (most kept at once), staleness (in updates).
    """
    from ..schedules.scenario import simulate_schedule, updates_of

    simulated = simulate_schedule(name, scenario)
    _present(simulated, updates or updates_of(name), html=html, trace=trace, as_json=as_json)


@schedule.command(epilog=TIMES_HELP)
@click.argument("file", type=FILE)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="2 for bidirectional schedules: the second half of the stages is a replica of the first.",
)
@click.option("--operations", type=FILE, help="A Python file that declares operations which FILE has.")
@shape_options
@updates_options
@click.option("--html", type=NEW_FILE, help="Write a page: the drawing, the reason for each gap, and memory.")
@click.option("--trace", type=NEW_FILE, help="Write a trace for Perfetto or chrome://tracing.")
@json_option
def check(
    *,
    file: Path,
    replicas: int,
    operations: Path | None,
    scenario: Scenario,
    updates: Updates | None,
    html: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Prove that the schedule in FILE can run, and draw it.

    FILE is CSV with one row per rank and one action per cell, as `export` writes it and
    torch.distributed.pipelining reads it; or, if it ends in .txt, rows of actions with blanks between
    them; or a schedule in the language, as mine.py:zigzag, for so many ranks (-p) and micro-batches (-m).
    Says which rule is broken, where, and what to change, and exits
    with 1, if it cannot run. With --json: the keys of `show`.
    """
    from ..schedules.scenario import simulate_file, simulate_schedule, updates_of, weights

    name = str(file)
    if file.name.partition(":")[0].endswith(".py"):
        if replicas > 1 or operations is not None:
            raise ConfigError(
                f"--replicas and --operations say nothing of {name}",
                hint="leave them out: a Python file says itself where its stages are, and what runs there",
            )
        simulated, updates = simulate_schedule(name, scenario), updates or updates_of(name)
    else:
        refuse_shape(name)
        simulated = simulate_file(file, scenario, replicas=replicas, operations=operations)
        updates = updates or Updates()
    weights(simulated, updates)
    if not as_json:
        count = sum(map(len, simulated.schedule.rows))
        click.echo(
            f"{file}: {count} actions on {simulated.schedule.ranks} ranks are complete and cannot block"
        )
    _present(simulated, updates, html=html, trace=trace, as_json=as_json)


@schedule.command(epilog=f"{NAME_HELP} {TIMES_HELP}")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@shape_options
@json_option
def compare(*, names: tuple[str, ...], scenario: Scenario, as_json: bool) -> None:
    """Compare schedules for the same ranks, micro-batches and times.

    Two bubbles: the idle share of rank-time until the last rank ends, which counts where all wait for the
    optimizer; and of the longest span from a rank's first to its last action, which counts where each rank
    goes on by itself (post-validation).

    A schedule that cannot be built so is named with the reason, after those that can; the exit status is 1.

    With --json: name -> step_s, bubble, span_s, span_bubble, peak, peak_bytes, as in `show`; or error, hint.
    """
    from ..schedules.scenario import simulate_schedule

    by_name: dict[str, SimulatedSchedule] = {}
    refused: dict[str, PipeloomError] = {}
    for name in names:
        try:
            by_name[name] = simulate_schedule(name, scenario)
        except (ScheduleError, PlanError) as error:
            refused[name] = error
    if as_json:
        errors = {name: {"error": why.message, "hint": why.hint} for name, why in refused.items()}
        print_json({name: _figures(simulated) for name, simulated in by_name.items()} | errors)
    elif by_name:
        _print_comparison(by_name)
    for why in refused.values():
        click.echo(f"error: {why.message}" + (f"\nhint: {why.hint}" if why.hint else ""), err=True)
    if refused:
        click.get_current_context().exit(1)


def _print_comparison(by_name: Mapping[str, SimulatedSchedule]) -> None:
    bubbles = "bubble until\nthe last ends", "bubble of the\nlongest span"
    table = new_table("schedule", "step time", *bubbles, "peak,\nmicro-batches", left=("schedule",))
    for name, simulated in by_name.items():
        s = simulated.summary
        table.add_row(name, f"{s.step_s:.6g}", _percent(s.bubble), _percent(s.span_bubble), _peak(simulated))
    console().print(table)


@schedule.command(epilog=f"{NAME_HELP} {TIMES_HELP}")
@click.argument("name")
@shape_options
@json_option
def explain(*, name: str, scenario: Scenario, as_json: bool) -> None:
    """Say why ranks are idle, and print the critical path.

    With --json: name, step_s, bubble, span_s, span_bubble, idle_s, reasons (reason -> rank-seconds, adding up
    to idle_s), sources: a list of reason, rank, seconds, share, text; path: a list of kind, rank, action,
    start_s, end_s, waiting (what waits for the link that it holds); and path_text: the path as it is printed.
    """
    from ..schedules.scenario import explain as idle_reasons, simulate_schedule
    from ..viewer import path, reasons

    simulated = simulate_schedule(name, scenario)
    explanation = idle_reasons(simulated)
    if not as_json:
        _print_explanation(name, simulated)
        return
    figures = _figures(simulated)
    pieces = ("kind", "rank", "action", "start_s", "end_s", "waiting")
    parts = ("reason", "rank", "seconds", "share", "text")
    print_json(
        {
            "name": name,
            **{key: figures[key] for key in ("step_s", "bubble", "span_s", "span_bubble")},
            "idle_s": explanation.idle_s,
            "reasons": explanation.by_reason,
            "sources": [{key: getattr(s, key) for key in parts} for s in reasons.sources(explanation)],
            "path": [{key: getattr(p, key) for key in pieces} for p in explanation.path],
            "path_text": [str(fold) for fold in path.fold(explanation.path)],
        }
    )


@schedule.command(epilog=f"{NAME_HELP} {TIMES_HELP}")
@click.argument("name")
@click.option("--output", "-o", type=NEW_FILE, help="File to write; standard output without it.")
@click.option("--transfers", is_flag=True, help="Write sends and receives too (torch's compute_comms).")
@shape_options
def export(*, name: str, output: Path | None, transfers: bool, scenario: Scenario) -> None:
    """Write the schedule NAME as CSV, which torch.distributed.pipelining and `check` read.

    A file that ends in .txt gets rows of actions instead, which can also say what a user declared.
    """
    from ..schedules.scenario import csv_text, simulate_schedule

    simulated = simulate_schedule(name, scenario)
    rows = output is not None and output.suffix == ".txt"
    text = f"{simulated.schedule}\n" if rows else csv_text(simulated, transfers=transfers)
    if output is None:
        click.echo(text, nl=False)
    else:
        from ..ir.text_files import write_whole

        write_whole(output, text)


def _figures(simulated: SimulatedSchedule) -> dict[str, float | None]:
    s = simulated.summary
    return {
        "step_s": s.step_s,
        "bubble": s.bubble,
        "span_s": s.span_s,
        "span_bubble": s.span_bubble,
        "peak": simulated.peak,
        "peak_bytes": max(simulated.peaks_bytes, default=None),
    }


def _by_rank(simulated: SimulatedSchedule) -> list[dict[str, Any]]:
    step_s = simulated.summary.step_s
    return [
        {
            "rank": r.rank,
            "busy_s": r.busy_s,
            "bubble": 1 - r.busy_s / step_s if step_s else 0.0,
            "peak": simulated.peaks[r.rank],
        }
        for r in simulated.summary.ranks
    ]


def _percent(share: float) -> str:
    # An idle share of nothing can come out as minus a rounding error.
    return f"{100 * share + 0.0:.1f} %".replace("-0.0", "0.0")


def _peak(simulated: SimulatedSchedule, unit: str = "") -> str:
    from ..ir.units import format_bytes

    size = f", {format_bytes(max(simulated.peaks_bytes))}" if simulated.peaks_bytes else ""
    return f"{simulated.peak:.4g}{unit}{size}"


def _present(
    simulated: SimulatedSchedule, updates: Updates, *, html: Path | None, trace: Path | None, as_json: bool
) -> None:
    from ..schedules.scenario import UNIT, explain as idle_reasons
    from ..viewer import chrome, terminal, units
    from ..viewer.html import write_report

    schedule, versions = simulated.schedule, _versions(simulated, updates)
    if html is not None:
        unit = units.SizeUnit(name="micro-batches", bytes=UNIT)
        write_report(
            html,
            title=f"{schedule.name}: {schedule.ranks} ranks, {simulated.microbatches} micro-batches, "
            "simulated",
            predicted=simulated.timeline,
            explanations=[idle_reasons(simulated)],
            size_unit=None if simulated.peaks_bytes else unit,
        )
    if trace is not None:
        chrome.write_trace(trace, [simulated.timeline])
    s, by_rank = simulated.summary, _by_rank(simulated)
    if as_json:
        shape = {
            "name": schedule.name,
            "ranks": schedule.ranks,
            "stages": schedule.stages,
            "microbatches": simulated.microbatches,
        }
        rows = str(schedule).splitlines()
        print_json({**shape, **_figures(simulated), "by_rank": by_rank, "rows": rows, "weights": versions})
        return
    beside = {
        "bubble": [_percent(r["bubble"]) for r in by_rank],
        "peak": [f"{r['peak']:.4g}" for r in by_rank],
    }
    out = console()
    out.print(terminal.gantt(simulated.timeline, columns=out.width, beside=beside, most_lines=MOST_LINES))
    click.echo(
        f"step {s.step_s:.6g}; bubble {_percent(s.bubble)} until the last rank ends, "
        f"{_percent(s.span_bubble)} of the longest span of a rank; peak {_peak(simulated, ' micro-batches')}"
    )
    if versions is not None:
        kept, late = (" ".join(map(str, versions[key])) for key in ("versions", "staleness"))
        click.echo(
            f"weights {updates.policy}, an update every {updates.every} micro-batches; per stage, versions "
            f"kept {kept}, gradients late by up to {late} updates"
        )


def _versions(simulated: SimulatedSchedule, updates: Updates) -> dict[str, Any] | None:
    from ..schedules.scenario import weights

    stages = weights(simulated, updates)
    if not stages:
        return None
    return {
        "policy": updates.policy,
        "update_every": updates.every,
        "versions": [s.needed for s in stages],
        "staleness": [max(s.staleness, default=0) for s in stages],
    }


def _print_explanation(name: str, simulated: SimulatedSchedule) -> None:
    from ..ir.explanation import REASONS
    from ..schedules.scenario import explain as idle_reasons
    from ..viewer import path, reasons

    explanation, s = idle_reasons(simulated), simulated.summary
    click.echo(
        f"{name}: {_percent(s.bubble)} of rank-time is idle until the last rank ends "
        f"({explanation.idle_s:.6g} of {explanation.ranks} x {explanation.step_s:.6g}); "
        f"{_percent(s.span_bubble)} of the longest span of a rank"
    )
    for reason, seconds, share, own in reasons.merged(reasons.sources(explanation)):
        click.echo(f"\n  {_percent(share):>6}  {reason} ({seconds:.6g}): {REASONS[reason]}")
        for source in own[:SHOWN]:
            click.echo(f"          {_percent(source.share):>6}  {source.text}")
        if rest := own[SHOWN:]:
            click.echo(f"          {_percent(sum(r.share for r in rest)):>6}  {len(rest)} more")
    click.echo("\ncritical path: only what makes one of these shorter makes the step shorter")
    for fold in path.fold(explanation.path):
        click.echo(f"  from {fold.start_s:<8.6g} for {fold.end_s - fold.start_s:<8.6g} {fold}")
