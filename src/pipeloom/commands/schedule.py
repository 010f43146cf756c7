"""pipeloom schedule: list, show, check, compare, explain and export schedules, without a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import FILE, console, json_option, print_json

if TYPE_CHECKING:
    from ..api.scheduling import Drawn, Setting

SETTING = (
    click.option("--ranks", "-p", type=click.IntRange(1), default=4, show_default=True),
    click.option("--microbatches", "-m", type=click.IntRange(1), default=8, show_default=True),
    click.option("--chunks", "-v", type=click.IntRange(1), default=None, help="Stages per rank."),
    click.option("--forward-s", "-F", type=float, default=1.0, show_default=True, help="Seconds of F."),
    click.option("--input-grad-s", "-I", type=float, default=1.0, show_default=True, help="Seconds of I."),
    click.option("--weight-grad-s", "-W", type=float, default=1.0, show_default=True, help="Seconds of W."),
    click.option(
        "--transfer-s", "-T", type=float, default=0.0, show_default=True, help="Seconds of a transfer."
    ),
)


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks, micro-batches and times, handed to the command as one `setting`."""

    @wraps(command)
    def with_setting(
        *, ranks: int, microbatches: int, chunks: int | None, forward_s: float, input_grad_s: float,
        weight_grad_s: float, transfer_s: float, **others: Any,
    ) -> Any:  # fmt: skip
        from ..api.scheduling import Setting

        setting = Setting(
            ranks=ranks, microbatches=microbatches, chunks=chunks or 0, forward_s=forward_s,
            input_grad_s=input_grad_s, weight_grad_s=weight_grad_s, transfer_s=transfer_s,
        )  # fmt: skip
        return command(setting=setting, **others)

    found: Callable[..., Any] = with_setting
    for option in reversed(SETTING):
        found = option(found)
    return found


@click.group()
def schedule() -> None:
    """Show, check, compare and export pipeline schedules. Times are those of one micro-batch on a rank."""


@schedule.command("list")
@json_option
def list_them(*, as_json: bool) -> None:
    """Print the schedules of the library. With --json: name -> about, place, lacks."""
    from ..api.scheduling import library

    found = library()
    if as_json:
        print_json(found)
        return
    for name, what in found.items():
        lacks = f" (shown only: running it needs {what['lacks']})" if what["lacks"] else ""
        click.echo(f"{name:<18} {what['about']}{lacks}")


@schedule.command()
@click.argument("name")
@setting_options
@click.option("--html", type=FILE, help="Write a report page.")
@click.option("--trace", type=FILE, help="Write a trace for Perfetto.")
@json_option
def show(*, name: str, setting: Setting, html: Path | None, trace: Path | None, as_json: bool) -> None:
    """Draw the schedule NAME. With --json: the keys of `compare`, and rows: one line of actions per rank."""
    from ..api.scheduling import draw_schedule

    _present(draw_schedule(name, setting), html=html, trace=trace, as_json=as_json)


@schedule.command()
@click.argument("file", type=FILE)
@setting_options
@json_option
def check(*, file: Path, setting: Setting, as_json: bool) -> None:
    """Prove that the schedule in FILE (CSV, one row per rank) can run, and draw it."""
    from ..api.scheduling import draw_file

    drawn = draw_file(file, setting)
    if not as_json:
        count = sum(map(len, drawn.schedule.rows))
        click.echo(f"{file}: {count} actions on {drawn.schedule.ranks} ranks are complete and cannot block")
    _present(drawn, html=None, trace=None, as_json=as_json)


@schedule.command()
@click.argument("names", nargs=-1, required=True)
@setting_options
@json_option
def compare(*, names: tuple[str, ...], setting: Setting, as_json: bool) -> None:
    """Compare the schedules NAMES for the same ranks, micro-batches and times.

    With --json: name -> step_s, bubble (until the last rank ends), span_bubble (each rank's own span) and
    peak (most micro-batches of residuals on a rank).
    """
    from rich.table import Table

    from ..api.scheduling import draw_schedule

    found = {name: _figures(draw_schedule(name, setting)) for name in names}
    if as_json:
        print_json(found)
        return
    table = Table(box=None)
    for head in ("schedule", "step", "bubble", "bubble of a rank's span", "peak, micro-batches"):
        table.add_column(head, justify="left" if head == "schedule" else "right")
    for name, f in found.items():
        shares = (f"{100 * float(f[key]):.1f} %" for key in ("bubble", "span_bubble"))
        table.add_row(name, f"{f['step_s']:g} s", *shares, f"{f['peak']:g}")
    console().print(table)


@schedule.command()
@click.argument("name")
@setting_options
@json_option
def explain(*, name: str, setting: Setting, as_json: bool) -> None:
    """Name the largest sources of idle time of the schedule NAME. With --json: reason -> rank-seconds."""
    from ..api.scheduling import draw_schedule, idle_reasons

    drawn = draw_schedule(name, setting)
    reasons = dict(idle_reasons(drawn.timeline))
    if as_json:
        print_json(reasons)
        return
    whole = drawn.timeline.step_s * drawn.schedule.ranks
    click.echo(f"{name}: {100 * drawn.summary.bubble:.1f} % of rank-time is idle")
    for reason, seconds in list(reasons.items())[:8]:
        click.echo(f"  {100 * seconds / whole:5.1f} %  {seconds:g} s  {reason}")


@schedule.command()
@click.argument("name")
@click.option("--output", "-o", type=FILE, help="File to write; standard output without it.")
@click.option("--transfers", is_flag=True, help="Write sends and receives too (compute_comms).")
@setting_options
def export(*, name: str, output: Path | None, transfers: bool, setting: Setting) -> None:
    """Write the schedule NAME as CSV for torch.distributed.pipelining."""
    from ..api.scheduling import csv_text, draw_schedule

    text = csv_text(draw_schedule(name, setting), transfers=transfers)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text)


def _figures(drawn: Drawn) -> dict[str, float]:
    summary = drawn.summary
    return {
        "step_s": summary.step_s, "bubble": summary.bubble, "span_bubble": summary.span_bubble,
        "peak": max(drawn.peaks, default=0.0),
    }  # fmt: skip


def _present(drawn: Drawn, *, html: Path | None, trace: Path | None, as_json: bool) -> None:
    from .. import viewer

    name = drawn.schedule.name
    if html is not None:
        viewer.write_report(html, title=f"{name}, simulated", predicted=drawn.timeline)
    if trace is not None:
        viewer.write_trace(trace, [drawn.timeline])
    if as_json:
        print_json({**_figures(drawn), "rows": str(drawn.schedule).splitlines()})
        return
    figures, out = _figures(drawn), console()
    out.print(viewer.gantt(drawn.timeline, width=max(20, min(out.width, 200) - 12)))
    out.print(
        f"step {figures['step_s']:g} s, bubble {100 * figures['bubble']:.1f} %, of a rank's own span "
        f"{100 * figures['span_bubble']:.1f} %, peak {figures['peak']:g} micro-batches"
    )
