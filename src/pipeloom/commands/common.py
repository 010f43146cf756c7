"""What commands share: errors as one sentence, options that several have, and how results are printed."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
from click.core import ParameterSource

from ..clusters.names import find_cluster
from ..ir.errors import ConfigError, PipeloomError, as_sentence, did_you_mean, shown
from ..ir.text import as_plain, finite, load_noun
from ..plan_settings import PlanSettings
from ..viewer.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..ir.cluster import Cluster
    from ..ir.profile import Profile
    from ..tracer.job import Job

Command = TypeVar("Command", bound=Callable[..., Any])


def claim(path: Path, ctx: click.Context | None, *, written: bool) -> None:
    """Refuse a command that would write a file which it also reads, or writes for something else.

    Raises: ConfigError.
    """
    real = os.path.realpath(path)
    if ctx is None or (os.path.exists(real) and not os.path.isfile(real)):  # /dev/null takes any number
        return
    claimed: dict[str, bool] = ctx.meta.setdefault("pipeloom.files", {})  # whether it is written
    if claimed.get(real, False) or (written and real in claimed):
        raise ConfigError(
            f"{path} would be written over: it is named for something else, too", hint="name another file"
        )
    claimed[real] = written


class ReadFile(click.Path):
    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        claim(Path(value), ctx, written=False)
        return path


FILE = ReadFile()
"""A file to read."""

MODEL_HELP = (
    "MODEL is file.py:function or package.module:function returning a pipeloom.Job; "
    "without it, the built-in GPT."
)


def _discard(descriptor: int) -> None:
    """Drop what is written to this file descriptor from now on."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


class _UnheardFile(io.FileIO):
    """A file descriptor to which one may go on writing when nobody reads any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _discard(self.fileno())
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
            warnings.formatwarning = as_sentence
        return super().main(args, *rest, **more)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PipeloomError as error:
            click.echo(f"error: {error}", err=True)
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
            _discard(sys.stdout.fileno())  # what is still in the buffer would be tried again at the end
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
        claim(path, ctx, written=True)
        return path


NEW_FILE = NewFile()


def _claim_source(ctx: click.Context, _: click.Parameter, model: str | None) -> str | None:
    if model is not None and model.partition(":")[0].endswith(".py"):
        claim(Path(model.partition(":")[0]), ctx, written=False)
    return model


model_argument = click.argument("model", required=False, callback=_claim_source)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


def ranks_or_auto(text: Any) -> int | str:
    if text == "auto":
        return "auto"
    try:
        return int(click.IntRange(1).convert(text, None, None))
    except click.BadParameter:
        raise click.BadParameter(f"{shown(text)} is neither auto nor a number from 1 on.") from None


class Amount(click.FloatRange):
    """A number within a range, which NaN is not: to click it is in any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is no number.", param, ctx)
        return number


class OneOf(click.Choice):  # type: ignore[type-arg]  # of older versions it takes none
    """A choice that names the word that may have been meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = did_you_mean(value, self.choices, "").capitalize()
            raise click.BadParameter(f"{error.message} {near}".rstrip(), ctx, param) from None


def plan_options(
    *names: str,
    of: type[PlanSettings] = PlanSettings,
    without: Collection[str] = (),
    unset: bool = False,
    auto: str = "",
) -> Callable[[Command], Command]:
    """Options for these settings, by default all, handed to the command by the names of their fields.

    unset: what is not given is None, since a config file may say it.  auto: what that means for --ranks.
    """

    def decorated(command: Command) -> Command:
        for one in reversed(fields(of)):
            if one.name in (names or [one.name]) and one.name not in without:
                command = _option(one, unset=unset, auto=auto if one.name == "ranks" else "")(command)
        return command

    return decorated


def _option(setting: Field[Any], *, unset: bool, auto: str) -> Callable[[Command], Command]:
    about, default, flag = setting.metadata, setting.default, f"--{setting.name.replace('_', '-')}"
    names = [name for name in (flag, about.get("short"), setting.name) if name]
    help, shown = about["help"] + auto, default is not None and not unset
    if isinstance(default, bool):
        names[0] = f"{flag}/--no-{flag[2:]}" if unset or default else flag
        return click.option(*names, is_flag=True, default=None if unset else default, help=help)
    kinds = {"folder": click.Path(file_okay=False), "file": click.Path(dir_okay=False)}
    kind: Any = kinds.get(about.get("kind", ""), float if isinstance(default, float) else str)
    if auto:
        kind = ranks_or_auto
    elif "least" in about:
        kind = click.IntRange(about["least"], about.get("most"))
    elif "words" in about:
        kind = OneOf(tuple(about["words"]))
    return click.option(*names, type=kind, default=None if unset else default, show_default=shown, help=help)


def settings_of(options: dict[str, Any]) -> PlanSettings:
    """The settings among a command's options, taken out of them."""
    names = [one.name for one in fields(PlanSettings) if one.name in options]
    given = {name: options.pop(name) for name in names}
    return PlanSettings(**{name: value for name, value in given.items() if value is not None})


def exclusive(*names: str, hint: str = "leave out one") -> None:
    """Raises: ConfigError if two of these parameters of the command that runs were both given."""
    ctx = click.get_current_context()
    given = [
        option.opts[0] + " auto" * (ctx.params[option.name] == "auto")
        if isinstance(option, click.Option)
        else option.human_readable_name
        for option in ctx.command.params
        if option.name in names
        and ctx.get_parameter_source(option.name) not in (None, ParameterSource.DEFAULT)
    ]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} were both given", hint=hint)


def job_of(model: str | None) -> Job:
    """The job that MODEL names, the built-in GPT if it names none."""
    if model is not None:
        from ..tracer.job import load_job

        return load_job(model)
    from ..train import workload
    from ..train.config import Config

    return workload.job_of(Config())


def not_the_built_in(plan_file: Path) -> ConfigError:
    return ConfigError(
        f"{plan_file} is not of the built-in GPT, and MODEL was not given",
        hint="name the model that it was made for, as file.py:function",
    )


def cluster_of(text: str | None) -> Cluster | None:
    return None if text is None else find_cluster(text)


def load_profile(path: Path | None) -> Profile | None:
    from ..ir.profile import Profile

    return None if path is None else load_noun(path, Profile)


def emit(result: object, screen: Iterable[Table | RenderableType], *, as_json: bool) -> None:
    """Print the result as one JSON object, or what stands on the screen: tables, lines of text, drawings.

    result: dataclasses, dicts, lists and numbers; infinities and NaN become text, since JSON has neither.
    screen: a generator, which does not run if it is not asked for.
    """
    if as_json:
        click.echo(json.dumps(finite(as_plain(result)), indent=1))
        return
    from ..viewer.terminal import console

    out = console()
    for thing in screen:
        if isinstance(thing, str):
            click.echo(thing)
            continue
        shown = thing.to_rich() if isinstance(thing, Table) else thing
        if not out.is_terminal:  # a table in a file or a pipe needs no folding
            room = out.measure(shown, options=out.options.update(max_width=1000))
            out.width = max(out.width, room.maximum if isinstance(thing, Table) else room.minimum)
        out.print(shown)
