"""pipeloom studio: a page to draw, ask, edit and save schedules and plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..ir.errors import ConfigError
from .common import cluster_of, job_of, model_argument, plan_options
from .schedule import shape_options

if TYPE_CHECKING:
    from ..schedules.scenario import Scenario


@click.command()
@click.argument("what", metavar="[PLAN | RUN | FILE]", required=False)
@model_argument
@plan_options("cluster")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; 0 for any free one."
)
def studio(*, what: str | None, model: str | None, cluster: str | None, port: int) -> None:
    """Open a page to play with schedules and plans: draw, compare, ask why, edit, save.

    Serves it on this machine only, until Ctrl-C, and prints its address, which nobody else knows. It opens
    with a saved plan, the directory of a run, rows of a schedule (.txt, .csv), or a schedule in the language,
    as mine.py:zigzag; without any, with 1F1B. With MODEL, the cuts of a plan can be moved, and it can be
    planned again for another cap.
    """
    from ..studio.opened import opened
    from ..studio.server import StudioServer

    job = None if model is None else job_of(model)
    start, answers = opened(what, read_words, job=job, cluster=cluster_of(cluster))
    server = StudioServer(start, answers, port=port)
    click.echo(f"{server.address}\nCtrl-C ends the studio")
    server.run()


def read_words(words: Sequence[str]) -> Scenario:
    """What the options of `pipeloom schedule show` say. Raises: ConfigError for what these do not know."""

    @click.command(add_help_option=False)
    @shape_options
    def setting(scenario: Scenario) -> Scenario:
        return scenario

    command: Any = setting
    try:
        scenario: Scenario = command.main(list(words), standalone_mode=False)
    except click.UsageError as error:
        raise ConfigError(error.format_message(), hint="correct the setting") from None
    return scenario
