"""What commands share: errors as one sentence, the MODEL argument, options that several have, JSON output."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from ..ir.errors import ConfigError, PipeloomError
from ..ir.memory_policy import TREATMENTS
from ..ir.units import parse_bytes
from ..ir.weight_policy import WEIGHT_POLICIES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..ir.cluster import Cluster
    from ..ir.profile import Profile
    from ..tracer.job import Job

Command = TypeVar("Command", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False)
"""A file to read."""

MODEL_HELP = (
    "MODEL is file.py:function or package.module:function returning a pipeloom.Job; "
    "without it, the built-in GPT."
)


class _UnheardFile(io.FileIO):
    """A file descriptor to which one may go on writing when nobody reads any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


def unbroken(out: TextIO) -> TextIO:
    """Standard output after which a command goes on when `| head -1` has seen enough: its files are written,
    and its exit status says what it found. Output that is no file of the system is returned as it is."""
    if not isinstance(out, io.TextIOWrapper):
        return out
    out.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_UnheardFile(out.fileno(), "w", closefd=False)),
        encoding=out.encoding,
        errors=out.errors,
        line_buffering=out.line_buffering,
        write_through=out.write_through,
    )


class Commands(click.Group):
    """Prints what pipeloom raises on purpose as a sentence and a hint; anything else keeps its traceback.

    Exit status: 2 for a wrong flag, file or key, as click does; 130 after Ctrl-C; 1 for everything else that
    went wrong.
    """

    _is_process = False

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """args: None for those of the process, which then ends with the command."""
        self._is_process = args is None
        if self._is_process:
            sys.stdout = unbroken(sys.stdout)
        return super().main(args, *rest, **more)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PipeloomError as error:
            click.echo(f"error: {error.message}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except KeyboardInterrupt:
            if self._is_process:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third Ctrl-C would end in a traceback
            click.echo("interrupted", err=True)
            ctx.exit(128 + signal.SIGINT)
        except OSError as error:
            if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            click.echo(f"error: cannot write the output: {error.strerror}", err=True)
            # What is still in the buffer would be tried again when Python ends.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            ctx.exit(1)


class NewFile(click.Path):
    """A file to be written: where it cannot be, that is said before the work for it is done."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        path = Path(value)
        if not path.name:
            raise ConfigError(f"cannot write {str(value)!r}: it names no file", hint="name a file")
        folder = (Path(os.path.realpath(path)) if path.is_symlink() else path).parent
        if not folder.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {folder}", hint="make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"cannot write {path}: writing into {folder} is not allowed", hint="name another file"
            )
        return path


NEW_FILE = NewFile()


class Size(click.ParamType[str]):
    """A size with a unit, kept as text."""

    name = "size"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_bytes(value)
        except ConfigError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        return value


def model_argument(command: Command) -> Command:
    return click.argument("model", required=False)(command)


weights_option = click.option(
    "--weights",
    type=click.Choice(tuple(WEIGHT_POLICIES)),
    help="How weights are updated: flush, once a step is over; 2bw or stash, without draining the pipeline. "
    "By default as the schedule does it.",
)

width_option = click.option(
    "--width",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Pipelines side by side: replicas of every stage, each on a rank of its own.",
)


chunks_option = click.option(
    "--chunks",
    "-v",
    type=click.IntRange(1),
    help="Stages per rank, for schedules that want several; 2 by default.",
)


class Stages(click.ParamType["int | str"]):
    """A number of ranks, or "auto"."""

    name = "integer or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return "auto" if value == "auto" else int(click.IntRange(1).convert(value, param, ctx))


def _stages_option(kind: click.ParamType[Any], more: str = "") -> Callable[[Command], Command]:
    help = f"Ranks of a pipeline. A schedule puts one stage on each, or several: see --chunks{more}."
    return click.option("--stages", "-p", type=kind, default=2, show_default=True, help=help)


PLAN_OPTIONS = (
    width_option,
    click.option("--schedule", "-s", default="1f1b", show_default=True, help="Schedule, by name."),
    chunks_option,
    click.option(
        "--microbatches",
        "-m",
        type=click.IntRange(1),
        default=8,
        show_default=True,
        help="Micro-batches per step, of all replicas together.",
    ),
    click.option(
        "--microbatch-size",
        type=click.IntRange(1),
        default=4,
        show_default=True,
        help="Rows per micro-batch.",
    ),
    click.option(
        "--split-backward", is_flag=True, help="Split each backward into input and weight gradients."
    ),
    click.option(
        "--shard-optimizer", is_flag=True, help="Replicas share out the optimizer's state, as ZeRO-1 does."
    ),
)


def plan_options(command: Command) -> Command:
    """What `planning.plan` needs, under its argument names."""
    return _with_options(command, _stages_option(click.IntRange(1)))


def shaped_plan_options(command: Command) -> Command:
    """The same, with --stages auto."""
    auto = "; auto: width, depth and micro-batches are chosen for --cluster and --global-batch"
    return _with_options(command, _stages_option(Stages(), auto))


def _with_options(command: Command, stages: Callable[[Command], Command]) -> Command:
    for option in reversed((stages, *PLAN_OPTIONS)):
        command = option(command)
    return command


def planner_option(default: str | None) -> Callable[[Command], Command]:
    """--planner, as the argument `planner`. default: None where a config has one."""
    return click.option(
        "--planner",
        "--strategy",
        default=default,
        show_default=default is not None,
        help="Planner, by name; see `pipeloom plan --planners`.",
    )


def treat_option(command: Command) -> Command:
    """--treat, as the argument `treat`: a name of `TREATMENTS`."""
    return click.option(
        "--treat",
        type=click.Choice(tuple(TREATMENTS)),
        help="What may be done with residuals besides keeping them. By default what the planner does.",
    )(command)


def offload_option(command: Command) -> Command:
    """--offload-dir, as the argument `offload_dir`: a folder, which need not be there."""
    return click.option(
        "--offload-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder on a disk where this machine's CPU may offload residuals to. Its speed is measured.",
    )(command)


def compile_option(help: str) -> Callable[[Command], Command]:
    """--compile, as the argument `compiled`. help: what for."""
    return click.option("--compile", "compiled", is_flag=True, help=help)


def cluster_option(help: str) -> Callable[[Command], Command]:
    """--cluster, as the argument `cluster`. help: what for."""
    named = 'As "8 x a100-40", "2 nodes of 8 x h100", or a cluster file; see `pipeloom cluster`.'
    return click.option("--cluster", metavar="CLUSTER", help=f"{help} {named}")


def json_option(command: Command) -> Command:
    help = "Print one JSON object instead of tables."
    return click.option("--json", "as_json", is_flag=True, help=help)(command)


def job_of(model: str | None) -> Job:
    """The job that MODEL names."""
    if model is not None:
        from ..tracer.job_loader import load_job

        return load_job(model)
    from ..train.config import Config
    from ..train.workload import default_job

    return default_job(Config())


def cluster_of(text: str | None) -> Cluster | None:
    """The cluster that --cluster names: devices that pipeloom knows, or a file."""
    from ..clusters.names import find_cluster

    return None if text is None else find_cluster(text)


def load_profile(path: Path | None) -> Profile | None:
    """The saved profile that --profile names."""
    from ..ir import json_codec
    from ..ir.profile import Profile

    return None if path is None else json_codec.load(path, Profile)


def new_table(*heads: str, left: Collection[str] = (), no_wrap: bool = False) -> Table:
    """An empty table with columns of figures. left: columns of words."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=no_wrap)
    return table


def console() -> Console:
    """Standard output; in a file or a pipe tables need no folding."""
    from rich.console import Console

    output = Console()
    return output if output.is_terminal else Console(width=120)


def print_json(values: object) -> None:
    """One object, indented; infinities and NaN as text, since JSON has neither."""
    click.echo(json.dumps(_finite(values), indent=1))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return value
