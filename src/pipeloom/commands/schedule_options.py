"""Options that `pipeloom schedule` commands share: shape, times, memory; and errors of files they write."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..ir.errors import ConfigError
from ..ir.weight_policy import WEIGHT_POLICIES, Updates
from .common import FILE, exclusive


class TimesType(click.ParamType[float | tuple[float, ...]]):
    """One time for all ranks, or several with commas, per stage."""

    name = "seconds[,seconds…]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | tuple[float, ...]:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        numbers = []
        for part in value.split(","):
            try:
                number = float(part)
            except ValueError:
                self.fail(f"{part.strip()!r} is not a number; write 1.5, or 1,2,1,1 per stage", param, ctx)
            if not isfinite(number) or number < 0:
                self.fail(f"{part.strip()} is not a time: times are finite and at least 0", param, ctx)
            numbers.append(number)
        return numbers[0] if len(numbers) == 1 else tuple(numbers)


class EdgesType(click.ParamType[tuple[tuple[int, int], ...]]):
    """Edges of a stage graph: "0-1 1-4 2-3 3-4"."""

    name = "edges"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        edges = []
        for part in value.replace(",", " ").split():
            found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", part)
            if found is None:
                self.fail(f"{part!r} is not an edge; write 0-1 for a message from stage 0 to 1", param, ctx)
            edges.append((int(found[1]), int(found[2])))
        if not edges:
            self.fail('there is no edge in it; write some, as in "0-1 1-4 2-3 3-4"', param, ctx)
        return tuple(edges)


EDGES = click.option(
    "--edges",
    type=EdgesType(),
    help='Stages that are no chain, by who sends to whom: "0-1 1-4 2-3 3-4" are two towers of two stages and '
    "what joins them. Stage 0 is on rank 0, and so on.",
)
SHAPE = (
    click.option(
        "--ranks",
        "-p",
        type=click.IntRange(1, 4096),
        default=4,
        show_default=True,
        help="Devices in the pipeline.",
    ),
    click.option(
        "--microbatches",
        "-m",
        type=click.IntRange(1),
        default=8,
        show_default=True,
        help="Micro-batches per step.",
    ),
    click.option(
        "--chunks", "-v", type=click.IntRange(1), help="Stages per rank; by default what the schedule needs."
    ),
)
SHORTEST = click.option(
    "--shortest",
    type=click.Choice(("step", "span")),
    default="step",
    show_default=True,
    help="Of a schedule's variants take the one with the shortest step; or with the shortest span, from a "
    "rank's first action to its last, which counts where each rank goes on by itself.",
)
TIMES = (
    click.option("--forward-s", "-F", type=TimesType(), help="Time of a forward.  [default: 1]"),
    click.option("--input-grad-s", "-I", type=TimesType(), help="Time of an input gradient.  [default: 1]"),
    click.option(
        "--weight-grad-s",
        "-W",
        type=TimesType(),
        help="Time of a weight gradient; a whole backward, B, takes I + W.  [default: 1]",
    ),
    click.option(
        "--transfer-s",
        "-T",
        type=TimesType(),
        default=0.0,
        show_default=True,
        help="Time of a message between ranks; several: one per boundary of two stages, or per edge.",
    ),
    click.option(
        "--per-node",
        type=click.IntRange(1),
        help="Ranks of a node: messages between nodes then wait for each other on one link out of "
        "each and one into it. Without it, every message has a link of its own.",
    ),
    click.option(
        "--times",
        type=FILE,
        help="Take F, I and W from a saved plan (per stage) or profile (spread evenly) instead.",
    ),
    click.option(
        "--pair-factor",
        type=click.FloatRange(0),
        default=1.0,
        show_default=True,
        help="What a pair of actions, F&B, takes of the sum of their times.",
    ),
    click.option(
        "--copy-ratio",
        "-k",
        type=click.FloatRange(0, min_open=True),
        default=0.75,
        show_default=True,
        help="What copying the residuals of a stage to the host and back takes of the time of its F, I and "
        "W: for schedules that offload.",
    ),
    click.option(
        "--per-uplink",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Neighbouring ranks that share one uplink to the host.",
    ),
    click.option(
        "--memory",
        default="",
        help="Most residuals that a rank may hold: micro-batches, as 2.5; or a size, as 3GiB, if --times is "
        "a plan.",
    ),
)
*_ABOUT, _LAST = (policy.about for policy in WEIGHT_POLICIES.values())
_VERSIONED = [name for name, policy in WEIGHT_POLICIES.items() if not policy.flushes]
_KEPT = [f"{policy.kept} for {name}" for name, policy in WEIGHT_POLICIES.items() if policy.kept]
_UNLIMITED = [name for name in _VERSIONED if not WEIGHT_POLICIES[name].kept]
UPDATES = (
    click.option(
        "--weights",
        type=click.Choice(tuple(WEIGHT_POLICIES)),
        help=f"How weights are updated: {', '.join(_ABOUT)}, or {_LAST}; "
        "by default as the schedule is meant.",
    ),
    click.option(
        "--update-every",
        type=click.IntRange(1),
        help=f"Micro-batches per update, for {' and '.join(_VERSIONED)}.  [default: 1]",
    ),
    click.option(
        "--keep-versions",
        type=click.IntRange(1),
        help=f"Weight versions that a stage keeps; by default {', '.join(_KEPT)}, and as many as it needs "
        f"for {' and '.join(_UNLIMITED)}.",
    ),
)
TIMES_HELP = (
    "Times are seconds, or any one unit: one number is the time of one micro-batch on all stages of a rank "
    "together; several, as 1,2,1,1, are the times of the stages from front to back."
)


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """-p, -m, -v, --edges, --shortest, times and memory, handed to the command as one `scenario`."""
    return _with_scenario(command, (*SHAPE, EDGES, SHORTEST, *TIMES))


def _given(name: str) -> bool:
    """Whether an option of the command that runs stands on its command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def refuse_shape(file: str) -> None:
    """Refuse what `shape_options` says of a schedule's shape, where a file of rows has it already.

    Raises: ConfigError that names the options.
    """
    names = {"ranks": "-p", "microbatches": "-m", "chunks": "-v", "shortest": "--shortest"}
    given = [option for name, option in names.items() if _given(name)]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} were given, and the rows of {file} have their ranks and micro-batches",
            hint=f"leave out {' and '.join(given)}; they are for schedules in Python files",
        )


def _with_scenario(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    @wraps(command)
    def with_scenario(
        *,
        forward_s: Any,
        input_grad_s: Any,
        weight_grad_s: Any,
        transfer_s: Any,
        times: Path | None,
        memory: str,
        pair_factor: float,
        per_node: int | None,
        copy_ratio: float,
        per_uplink: int,
        ranks: int = 1,
        microbatches: int = 1,
        chunks: int | None = None,
        edges: tuple[tuple[int, int], ...] | None = None,
        shortest: str = "step",
        **arguments: Any,
    ) -> Any:
        from ..schedules.scenario import MicrobatchTimes, Scenario, load_work

        for name in ("ranks", "chunks"):
            exclusive("edges", name, hint="each stage that an edge names has a rank of its own")
        options = dict(forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)
        numbers = {name: value for name, value in options.items() if value is not None}
        for name in options:
            exclusive("times", name, hint="give the file or the numbers")
        scenario = Scenario(
            ranks=ranks,
            microbatches=microbatches,
            chunks=chunks or 0,
            times=load_work(times) if times else MicrobatchTimes(**numbers),
            transfer_s=transfer_s,
            per_node=per_node or 0,
            memory=memory,
            pair_factor=pair_factor,
            edges=edges or (),
            copy_ratio=copy_ratio,
            per_uplink=per_uplink,
            shortest=shortest,
        )
        return command(scenario=scenario, **arguments)

    decorated: Callable[..., Any] = with_scenario
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def updates_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--weights and what goes with it, handed to the command as `updates`: None unless given."""

    @wraps(command)
    def with_updates(
        *, weights: Any, update_every: int | None, keep_versions: int | None, **arguments: Any
    ) -> Any:
        if (weights is None or WEIGHT_POLICIES[weights].flushes) and (update_every or keep_versions):
            raise ConfigError(
                "--update-every and --keep-versions say nothing without versions of weights",
                hint=f"add {' or '.join(f'--weights {name}' for name in _VERSIONED)}",
            )
        updates = Updates(policy=weights, every=update_every or 1, kept=keep_versions) if weights else None
        return command(updates=updates, **arguments)

    decorated: Callable[..., Any] = with_updates
    for option in reversed(UPDATES):
        decorated = option(decorated)
    return decorated
