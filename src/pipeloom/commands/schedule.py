"""pipeloom schedule: list, show, check, compare, explain and export schedules, without a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import reduce, wraps
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..ir.errors import ConfigError, PipeloomError
from ..ir.text import format_bytes, show_microbatches, show_share, write_whole
from ..ir.weight_policies import WEIGHT_POLICIES, Updates
from ..viewer.table import Column, Table
from .common import FILE, NEW_FILE, Amount, Command, OneOf, emit, exclusive, json_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..checks.updates import UpdateProof
    from ..schedules.scenario import Scenario, SimulatedSchedule

MOST_LINES = 60
"""A drawing goes on below itself up to so many lines, so that micro-batches have room for their numbers."""

SHOWN = 3
"""Sources that `explain` prints under each reason."""

STAGE_TIMES = ("forward_s", "input_grad_s", "weight_grad_s")


def seconds(text: str) -> float | tuple[float, ...]:
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            raise click.BadParameter(
                f"{part.strip()!r} is not a number; write 1.5, or 1,2,1,1 per stage"
            ) from None
        if not isfinite(number) or number < 0:
            raise click.BadParameter(f"{part.strip()} is not a time: times are finite and at least 0")
        numbers.append(number)
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def edges(text: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for part in text.replace(",", " ").split():
        ends = re.fullmatch(r"(\d{1,4})-(\d{1,4})", part)
        if ends is None:
            raise click.BadParameter(f"{part!r} is not an edge; write 0-1 for a message from stage 0 to 1")
        pairs.append((int(ends[1]), int(ends[2])))
    if not pairs:
        raise click.BadParameter('there is no edge in it; write some, as in "0-1 1-4 2-3 3-4"')
    return tuple(pairs)


SHORTEST = click.option(
    "--shortest",
    type=OneOf(("step", "span")),
    default="step",
    help="Of a schedule's variants take the one with the shortest step; or with the shortest span, from a "
    "rank's first action to its last, which counts where each rank goes on by itself.",
)
SCENARIO = (
    click.option("--ranks", "-p", type=click.IntRange(1, 4096), default=4, help="Devices in the pipeline."),
    click.option("--microbatches", "-m", type=click.IntRange(1), default=8, help="Micro-batches per step."),
    click.option(
        "--chunks", "-v", type=click.IntRange(1), help="Stages per rank; by default what the schedule needs."
    ),
    click.option(
        "--edges",
        type=edges,
        help='Stages that are no chain, by who sends to whom: "0-1 1-4 2-3 3-4" are two towers of two '
        "stages and what joins them. Stage 0 is on rank 0, and so on.",
    ),
    SHORTEST,
    click.option("--forward-s", "-F", type=seconds, help="Time of a forward.  [default: 1]"),
    click.option("--input-grad-s", "-I", type=seconds, help="Time of an input gradient.  [default: 1]"),
    click.option(
        "--weight-grad-s",
        "-W",
        type=seconds,
        help="Time of a weight gradient; a whole backward, B, takes I + W.  [default: 1]",
    ),
    click.option(
        "--transfer-s",
        "-T",
        type=seconds,
        default="0.0",
        help="Time of a message between ranks; several: one per boundary of two stages, or per edge.",
    ),
    click.option(
        "--per-node",
        type=click.IntRange(1),
        help="Ranks of a node: messages between nodes then wait for each other on one link out of "
        "each and one into it. Without it, only those from one rank to the same other wait.",
    ),
    click.option(
        "--times",
        type=FILE,
        help="Take F, I and W from a saved plan (per stage; without -p, one on each rank) or profile (spread "
        "evenly) instead.",
    ),
    click.option(
        "--pair-factor",
        type=Amount(0),
        default=1.0,
        help="What a pair of actions, F&B, takes of the sum of their times.",
    ),
    click.option(
        "--copy-ratio",
        "-k",
        type=Amount(0, min_open=True),
        default=0.75,
        help="What copying the residuals of a stage to the host and back takes of the time of its F, I and "
        "W: for schedules that offload.",
    ),
    click.option(
        "--per-uplink",
        type=click.IntRange(1),
        default=1,
        help="Neighbouring ranks that share one uplink to the host.",
    ),
    click.option(
        "--memory",
        default="",
        show_default=False,
        help="Most residuals that a rank may hold: micro-batches, as 2.5; or a size, as 3GiB, if --times is "
        "a plan.",
    ),
)
*_ABOUT, _LAST = (policy.about for policy in WEIGHT_POLICIES.values())
_VERSIONED = [name for name, policy in WEIGHT_POLICIES.items() if not policy.flushes]
UPDATES = (
    click.option(
        "--weights",
        type=OneOf(tuple(WEIGHT_POLICIES)),
        help=f"How weights are updated: {', '.join(_ABOUT)}, or {_LAST}; "
        "by default as the schedule is meant.",
    ),
    click.option(
        "--update-every",
        type=click.IntRange(1),
        help=f"Micro-batches per update, for {' and '.join(_VERSIONED)}.  [default: 1]",
    ),
)
TIMES_HELP = (
    "Times are seconds, or any one unit: one number is the time of one micro-batch on all stages of a rank "
    "together; several, as 1,2,1,1, are the times of the stages from front to back."
)
HELP = f"NAME is one of `pipeloom schedule list`; options follow a colon, as in gis_g:group=3. {TIMES_HELP}"


def with_options(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    return reduce(lambda command, option: option(command), reversed(options), command)


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options handed to the command as one `scenario`."""

    @wraps(command)
    def with_scenario(**arguments: Any) -> Any:
        from ..schedules.formats import read_schedule
        from ..schedules.language.names import parse_name
        from ..schedules.scenario import MicrobatchTimes, Scenario, load_work

        for name in ("ranks", "chunks"):
            exclusive("edges", name, hint="each stage that an edge names has a rank of its own")
        for name in STAGE_TIMES:
            exclusive("times", name, hint="give the file or the numbers")
        names = [*STAGE_TIMES, *(one.name for one in fields(Scenario))]
        taken = {name: arguments.pop(name) for name in names}
        numbers = {name: taken.pop(name) for name in STAGE_TIMES}
        files: dict[str, int] = {}
        if taken["times"] is None:
            times = MicrobatchTimes(**{k: n for k, n in numbers.items() if n is not None})
        else:
            times = load_work(taken["times"])
            if isinstance(times.forward_s, tuple) and len(times.forward_s) > 1:  # of a plan's stages
                files = {"ranks": len(times.forward_s)}
        if "name" in arguments and parse_name(arguments["name"]).lists_actions:
            rows = read_schedule(Path(arguments["name"]))
            files = {"ranks": rows.ranks, "microbatches": rows.microbatches}
        source = click.get_current_context().get_parameter_source
        taken |= {k: n for k, n in files.items() if source(k) is ParameterSource.DEFAULT}
        given = {name: value for name, value in taken.items() if value is not None} | {"times": times}
        return command(scenario=Scenario(**given), **arguments)

    return with_options(with_scenario, SCENARIO)


def refuse_shape(file: str) -> None:
    names = {"ranks": "-p", "microbatches": "-m", "chunks": "-v", "shortest": "--shortest"}
    source = click.get_current_context().get_parameter_source
    given = [option for name, option in names.items() if source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise ConfigError(
            f"the rows of {file} have their ranks and micro-batches, {' and '.join(given)} gives them others",
            hint=f"leave out {' and '.join(given)}; they are for schedules in Python files",
        )


def updates_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options handed to the command as `updates`: None unless given."""

    @wraps(command)
    def with_updates(*, weights: Any, update_every: int | None, **arguments: Any) -> Any:
        if weights is None and update_every and "name" in arguments:
            from ..schedules.scenario import updates_of

            weights = updates_of(arguments["name"]).policy
        if (weights is None or WEIGHT_POLICIES[weights].flushes) and update_every:
            raise ConfigError(
                "--update-every says nothing without versions of weights",
                hint=f"add {' or '.join(f'--weights {name}' for name in _VERSIONED)}",
            )
        updates = Updates(policy=weights, every=update_every or 1) if weights else None
        return command(updates=updates, **arguments)

    return with_options(with_updates, UPDATES)


def file_options(command: Command) -> Command:
    page = "Write a page: the drawing, the reason for each gap, and memory."
    trace = "Write a trace for Perfetto or chrome://tracing."
    files = (("--html", page), ("--trace", trace))
    return with_options(command, [click.option(name, type=NEW_FILE, help=help) for name, help in files])


@click.group()
def schedule() -> None:
    """List, draw, check, compare, explain, tune and export pipeline schedules, without a model."""


@schedule.command("list")
@json_option
def list_them(*, as_json: bool) -> None:
    """Print the schedules of the library, with the names that torch, Megatron-LM and papers have for them."""
    from ..schedules.scenario import library

    entries = library()

    def screen() -> Iterator[str]:
        for name, entry in entries.items():
            lacks = f" (shown only: running it needs {entry['lacks']})" if entry["lacks"] else ""
            yield f"{name:<18} {entry['about']}{lacks}"
            if entry["aliases"]:
                yield f"{'':<18} also: {', '.join(entry['aliases'])}"
        yield (
            "\nF: forward, I: input gradient, W: weight gradient, B: I and W as one. A word in `` is an "
            "option, written\nbehind a colon: pipeloom schedule show gis_g:group=3. Schedules with several "
            "stages on each rank have `v`,\nhow many: pipeloom schedule compare interleaved:v=2 "
            "interleaved:v=4"
        )

    emit(entries, screen(), as_json=as_json)


@schedule.command(epilog=HELP)
@click.argument("name")
@shape_options
@updates_options
@file_options
@json_option
def show(*, name: str, scenario: Scenario, updates: Updates | None, **files: Any) -> None:
    """Draw the schedule NAME."""
    from ..schedules.scenario import simulate_schedule, updates_of

    _present(simulate_schedule(name, scenario), updates or updates_of(name), **files)


@schedule.command(epilog=TIMES_HELP)
@click.argument("file", type=FILE)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    help="2 for bidirectional schedules: the second half of the stages is a replica of the first.",
)
@click.option("--operations", type=FILE, help="A Python file that declares operations which FILE has.")
@shape_options
@updates_options
@file_options
@json_option
def check(
    *,
    file: Path,
    replicas: int,
    operations: Path | None,
    scenario: Scenario,
    updates: Updates | None,
    as_json: bool,
    **files: Any,
) -> None:
    """Prove that the schedule in FILE can run, and draw it.

    FILE is CSV with one row per rank and one action per cell, as `export` writes it and
    torch.distributed.pipelining reads it; or, if it ends in .txt, rows of actions with blanks between
    them; or a schedule in the language, as mine.py:zigzag, for so many ranks (-p) and micro-batches (-m).
    Says which rule is broken, where, and what to change, and exits with 1, if it cannot run.
    """
    from ..schedules.scenario import prove, simulate_file, simulate_schedule, updates_of

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
    proof = prove(simulated, updates)
    if not as_json:
        count = sum(map(len, simulated.schedule.rows))
        click.echo(
            f"{file}: {count} actions on {simulated.schedule.ranks} ranks are complete and cannot block"
        )
    _present(simulated, updates, proof, as_json=as_json, **files)


def _present(
    simulated: SimulatedSchedule,
    updates: Updates,
    proof: UpdateProof | None = None,
    *,
    html: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    from ..reports import rank_columns, schedule_page
    from ..schedules.scenario import weights
    from ..viewer.chrome import write_trace
    from ..viewer.terminal import console, gantt

    schedule = simulated.schedule
    stages = weights(simulated, updates)
    if html is not None:
        write_whole(html, schedule_page(simulated))
    if trace is not None:
        write_trace(trace, [simulated.timeline])
    versions: dict[str, Any] = {
        "policy": updates.policy,
        "update_every": updates.every,
        "versions": [s.needed for s in stages],
        "staleness": [max(s.staleness, default=0) for s in stages],
    }
    step_s = simulated.summary.step_s
    figures: dict[str, Any] = {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": simulated.microbatches,
        **simulated.figures(),
        "by_rank": simulated.by_rank(),
        "rows": str(schedule).splitlines() if as_json else [],  # of large schedules this takes a while
        "weights": versions if stages else None,
    }
    if proof is not None:
        figures["updates"] = proof

    def screen() -> Iterator[RenderableType]:
        beside = rank_columns(simulated)
        yield gantt(simulated.timeline, columns=console().width, beside=beside, most_lines=MOST_LINES)
        yield (
            f"step {step_s:.6g}; bubble {show_share(figures['bubble'])} until the last rank ends, "
            f"{show_share(figures['span_bubble'])} of the longest span of a rank; peak "
            f"{_peak(simulated, ' micro-batches')}"
        )
        if stages:
            kept, late = (" ".join(map(str, versions[key])) for key in ("versions", "staleness"))
            yield (
                f"weights {updates.policy}, an update every {show_microbatches(updates.every)}; "
                f"per stage, versions kept {kept}, gradients late by up to {late} updates"
            )
        if proof is not None:
            yield str(proof)

    emit(figures, screen(), as_json=as_json)


def _peak(simulated: SimulatedSchedule, unit: str = "") -> str:
    size = f", {format_bytes(max(simulated.peaks_bytes))}" if simulated.peaks_bytes else ""
    return f"{simulated.peak:.4g}{unit}{size}"


@schedule.command(epilog=HELP)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@shape_options
@json_option
def compare(*, names: tuple[str, ...], scenario: Scenario, as_json: bool) -> None:
    """Compare schedules for the same ranks, micro-batches and times.

    Two bubbles: the idle share of rank-time until the last rank ends, which counts where all wait for the
    optimizer; and of the longest span from a rank's first to its last action, which counts where each rank
    goes on by itself (post-validation).

    A schedule that cannot be built so is named with the reason, after those that can; the exit status is 1.
    """
    from ..schedules.scenario import simulate_schedule

    by_name: dict[str, SimulatedSchedule] = {}
    refused: dict[str, PipeloomError] = {}
    for name in names:
        try:
            by_name[name] = simulate_schedule(name, scenario)
        except PipeloomError as error:
            refused[name] = error
    figures = {name: simulated.figures() for name, simulated in by_name.items()}
    errors = {name: {"error": why.message, "hint": why.hint} for name, why in refused.items()}

    def screen() -> Iterator[Table]:
        columns = (
            Column("schedule", left=True),
            Column("step time", "{:.6g}".format),
            Column("bubble until\nthe last ends", show_share),
            Column("bubble of the\nlongest span", show_share),
            Column("peak,\nmicro-batches"),
        )
        rows = [
            (name, one.summary.step_s, one.summary.bubble, one.summary.span_bubble, _peak(one))
            for name, one in by_name.items()
        ]
        if rows:
            yield Table("", columns, rows)

    emit(figures | errors, screen(), as_json=as_json)
    for name, why in refused.items():
        click.echo(f"error: {name}: {why}", err=True)
    if refused:
        click.get_current_context().exit(1)


@schedule.command(epilog=HELP)
@click.argument("name")
@shape_options
@json_option
def explain(*, name: str, scenario: Scenario, as_json: bool) -> None:
    """Say why ranks are idle, and print the critical path."""
    from ..ir.explanation import REASONS
    from ..schedules.scenario import explain as idle_reasons, simulate_schedule
    from ..viewer.reasons import merged, path_lines, sources

    simulated = simulate_schedule(name, scenario)
    explanation = idle_reasons(simulated)
    causes = sources(explanation)
    figures = {key: simulated.figures()[key] for key in ("step_s", "bubble", "span_s", "span_bubble")}
    pieces = ("kind", "rank", "action", "start_s", "end_s", "waiting")

    def screen() -> Iterator[str]:
        yield (
            f"{name}: {show_share(figures['bubble'])} of rank-time is idle until the last rank ends "
            f"({explanation.idle_s:.6g} of {explanation.ranks} x {figures['step_s']:.6g}); "
            f"{show_share(figures['span_bubble'])} of the longest span of a rank"
        )
        for reason, seconds, share, largest in merged(causes):
            yield f"\n  {show_share(share):>6}  {reason} ({seconds:.6g}): {REASONS[reason]}"
            for source in largest[:SHOWN]:
                yield f"          {show_share(source.share):>6}  {source.text}"
            if rest := largest[SHOWN:]:
                yield f"          {show_share(sum(r.share for r in rest)):>6}  {len(rest)} more"
        yield "\ncritical path: only what makes one of these shorter makes the step shorter"
        yield from (f"  {line}" for line in path_lines(explanation.path))

    result = {
        "name": name,
        **figures,
        "idle_s": explanation.idle_s,
        "reasons": explanation.by_reason,
        "sources": causes,
        "path": [{key: getattr(piece, key) for key in pieces} for piece in explanation.path],
    }
    emit(result, screen(), as_json=as_json)


@schedule.command(epilog=HELP)
@click.argument("name")
@click.option("--output", "-o", type=NEW_FILE, help="File to write; standard output without it.")
@click.option("--transfers", is_flag=True, help="Write sends and receives too (torch's compute_comms).")
@shape_options
def export(*, name: str, output: Path | None, transfers: bool, scenario: Scenario) -> None:
    """Write the schedule NAME as CSV, which torch.distributed.pipelining and `check` read.

    A file that ends in .txt gets rows of actions instead, which can also say what a user declared.
    """
    from ..schedules.scenario import csv_text, simulate_schedule

    rows = output is not None and output.suffix == ".txt"
    if rows and transfers:
        raise ConfigError(f"--transfers has no place in {output}", hint="name a .csv, or leave it out")
    simulated = simulate_schedule(name, scenario)
    text = f"{simulated.schedule}\n" if rows else csv_text(simulated, transfers=transfers)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(output, text)


@schedule.command(epilog=HELP)
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@shape_options
@json_option
def diff(*, one: str, other: str, scenario: Scenario, as_json: bool) -> None:
    """Say where the schedules A and B first differ on each rank, and how long ranks are idle in each, and
    why."""
    from ..schedules.scenario import simulate_schedule
    from ..schedules.tuning import divergences, idle_side_by_side

    both = [simulate_schedule(name, scenario) for name in (one, other)]
    places, idle = divergences(*both), idle_side_by_side(*both)
    steps = [simulated.summary.step_s for simulated in both]
    result = {"step_s": steps, "divergences": places, "idle": {reason: (a, b) for reason, a, b in idle}}

    def screen() -> Iterator[str | Table]:
        yield f"step {steps[0]:.6g} in {one}, {steps[1]:.6g} in {other}"
        if not places:
            yield "they run the same actions in the same order on every rank"
        for d in places:
            a, b = (
                f"{action} at {start:.6g}" if action else "nothing more"
                for action, start in zip(d.actions, d.starts_s, strict=True)
            )
            yield f"rank {d.rank}: the same {d.place} actions, then {a} in {one}, {b} in {other}"
        seconds = "{:.6g}".format
        columns = [Column("idle, rank-seconds", left=True), Column(one, seconds), Column(other, seconds)]
        columns.append(Column("difference", "{:+.6g}".format))
        yield Table("", columns, [(reason, a, b, b - a) for reason, a, b in idle])

    emit(result, screen(), as_json=as_json)


@schedule.command(epilog=HELP)
@click.argument("name")
@click.argument("action")
@shape_options
@json_option
def why(*, name: str, action: str, scenario: Scenario, as_json: bool) -> None:
    """Say why ACTION, such as 2B5, of the schedule NAME begins when it does: what it waited for last, and
    what that waited for, back to the start."""
    from ..schedules.scenario import causes_of, simulate_schedule
    from ..viewer.reasons import piece_text

    causes = causes_of(simulate_schedule(name, scenario))
    item = causes.find(action)
    path = list(causes.path(item, item.end_s))
    emit(path, map(piece_text, path), as_json=as_json)


@schedule.command(epilog=HELP)
@click.argument("name")
@shape_options
@json_option
def sensitivity(*, name: str, scenario: Scenario, as_json: bool) -> None:
    """Say what a step of NAME takes if F, I or W of one stage, or all messages, take 10 % less.

    The order of actions stays.
    """
    from ..schedules.scenario import simulate_schedule
    from ..schedules.tuning import sensitivity as changes_of

    simulated = simulate_schedule(name, scenario)
    changes, step_s = changes_of(simulated), simulated.summary.step_s

    def screen() -> Iterator[str | Table]:
        yield f"{name}: a step takes {step_s:.6g}; with 10 % less for"
        seconds = "{:.6g}".format
        columns = (
            *(Column("what", left=True), Column("stage")),
            *(Column("step", seconds), Column("saved", seconds)),
        )
        rows = [(c.what, c.stage if c.stage >= 0 else "", c.step_s, c.saved_s) for c in changes]
        yield Table("", columns, rows)

    emit({"step_s": step_s, "changes": changes}, screen(), as_json=as_json)
