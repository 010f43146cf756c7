"""pipeloom schedule diff, why and sensitivity: tuning a schedule by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .common import console, json_option, new_table, print_json
from .schedule import NAME_HELP
from .schedule_options import TIMES_HELP, shape_options

if TYPE_CHECKING:
    from ..schedules.scenario import Scenario
    from ..schedules.tuning import Cause

HELP = f"{NAME_HELP} {TIMES_HELP}"


@click.command(epilog=HELP)
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@shape_options
@json_option
def diff(*, one: str, other: str, scenario: Scenario, as_json: bool) -> None:
    """Say where the schedules A and B first differ on each rank, and how long ranks are idle in each, and
    why.

    With --json: step_s of both; divergences: a list of rank, place (in its row, from 0), actions and
    starts_s, of A and of B; idle: reason -> rank-seconds in A and in B.
    """
    from ..schedules.scenario import simulate_schedule
    from ..schedules.tuning import divergences, idle_side_by_side

    both = [simulate_schedule(name, scenario) for name in (one, other)]
    found, idle = divergences(*both), idle_side_by_side(*both)
    steps = [simulated.summary.step_s for simulated in both]
    if as_json:
        reasons = {reason: [a, b] for reason, a, b in idle}
        print_json({"step_s": steps, "divergences": [asdict(d) for d in found], "idle": reasons})
        return
    click.echo(f"step {steps[0]:.6g} in {one}, {steps[1]:.6g} in {other}")
    if not found:
        click.echo("they run the same actions in the same order on every rank")
    for d in found:
        a, b = (
            f"{action} at {start:.6g}" if action else "nothing more"
            for action, start in zip(d.actions, d.starts_s, strict=True)
        )
        click.echo(f"rank {d.rank}: the same {d.place} actions, then {a} in {one}, {b} in {other}")
    table = new_table("idle, rank-seconds", one, other, "difference", left=("idle, rank-seconds",))
    for reason, first, second in idle:
        table.add_row(reason, f"{first:.6g}", f"{second:.6g}", f"{second - first:+.6g}")
    console().print(table)


@click.command(epilog=HELP)
@click.argument("name")
@click.argument("action")
@shape_options
@json_option
def why(*, name: str, action: str, scenario: Scenario, as_json: bool) -> None:
    """Say why ACTION, such as 2B5, of the schedule NAME begins when it does: the chain of causes back to the
    start.

    With --json: a list, ACTION first, of action, rank, start_s, end_s, reason ("rank": its rank ran `cause`
    until then; "message": it needed `cause`; "partner": another rank of its stage waited for `cause`;
    "start") and cause.
    """
    from ..schedules.scenario import simulate_schedule
    from ..schedules.tuning import why as causes_of

    chain = causes_of(simulate_schedule(name, scenario), action)
    if as_json:
        print_json([asdict(cause) for cause in chain])
        return
    for cause in chain:
        click.echo(f"{cause.action:>8} on rank {cause.rank} from {cause.start_s:<8.6g} {_words(cause)}")


def _words(cause: Cause) -> str:
    return {
        "rank": f"its rank ran {cause.cause} until then",
        "message": f"it needed {cause.cause}",
        "partner": f"another rank of its stage waited for {cause.cause}",
        "start": "nothing was before it",
    }[cause.reason]


@click.command(epilog=HELP)
@click.argument("name")
@shape_options
@json_option
def sensitivity(*, name: str, scenario: Scenario, as_json: bool) -> None:
    """Say what a step of NAME takes if F, I or W of one stage, or all messages, take 10 % less.

    The order of actions stays. With --json: step_s, and changes: a list of what, stage (-1 for messages),
    step_s and saved_s, what saves most first.
    """
    from ..schedules.scenario import simulate_schedule
    from ..schedules.tuning import sensitivity as changes_of

    simulated = simulate_schedule(name, scenario)
    changes = changes_of(simulated)
    if as_json:
        print_json({"step_s": simulated.summary.step_s, "changes": [asdict(change) for change in changes]})
        return
    click.echo(f"{name}: a step takes {simulated.summary.step_s:.6g}; with 10 % less for")
    table = new_table("what", "stage", "step", "saved", left=("what",))
    for change in changes:
        stage = "" if change.stage < 0 else str(change.stage)
        table.add_row(change.what, stage, f"{change.step_s:.6g}", f"{change.saved_s:.6g}")
    console().print(table)
