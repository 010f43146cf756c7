"""The command line: registers the commands. Imports no torch: `pipeloom --help` answers at once."""

from __future__ import annotations

import click

from . import __version__
from .commands.bench import bench
from .commands.cluster import cluster
from .commands.common import Commands
from .commands.export import export
from .commands.export_plan import export_plan
from .commands.plan import plan
from .commands.profile import profile
from .commands.schedule import schedule
from .commands.schedule_search import search
from .commands.simulate import simulate
from .commands.studio import studio
from .commands.train import train
from .commands.verify import verify


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "show_default": True,
    },
)
@click.version_option(__version__, prog_name="pipeloom")
def main() -> None:
    """Train an unmodified PyTorch model across devices that are each too small for it."""


schedule.add_command(search)
for command in (
    train,
    profile,
    plan,
    simulate,
    schedule,
    studio,
    verify,
    bench,
    export,
    export_plan,
    cluster,
):
    main.add_command(command)
