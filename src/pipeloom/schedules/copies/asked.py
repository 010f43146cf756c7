"""What a schedule's name asks to be copied: its options `offload`, `limit` and `fit`, which every
family takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ...ir.errors import ScheduleError
from ..language.shape import Shape
from .place import Copies

OFFLOAD, LIMIT, FIT = "offload", "limit", "fit"
COPY_OPTIONS = (OFFLOAD, LIMIT, FIT)


class Usual(Protocol):
    """What a schedule copies where its name does not say it, as `Entry` has it."""

    @property
    def offload(self) -> Callable[[Shape], int] | None: ...
    @property
    def held(self) -> Callable[[Shape, int], float] | None: ...


def copies_asked(
    name: str,
    options: Mapping[str, float],
    shape: Shape,
    usual: Usual,
    room: tuple[float, ...] | None = None,
) -> Copies | None:
    """What the options ask for; None for no copies.

    offload: how many stages of each rank, those whose residuals are kept longest.  limit: the most residuals
    of a rank, in those of one micro-batch on its largest stage.  fit: 1 for as many copies as it takes until
    each rank has room for what stays; where no room is known, ranks hold as little as they can.
    room: bytes that each rank has for residuals.
    Raises: ScheduleError if they are no such numbers.
    """
    stages = options.get(OFFLOAD, 0.0 if usual.offload is None else float(usual.offload(shape)))
    limit = options.get(LIMIT)
    if options.get(FIT, 0.0):
        _refuse_other_limits(name, options)
        return Copies(stages=int(stages), room=room or (0.0,) * shape.ranks)
    if stages != int(stages) or not 0 <= stages <= shape.chunks:
        raise ScheduleError(
            f"{name} offloads {stages:g} of the {shape.chunks} stages of a rank",
            hint=f"give a whole number from 0 to {shape.chunks}",
        )
    if limit is None:
        if not stages:
            return None
        held = None if usual.held is None else usual.held(shape, int(stages))
        return Copies(stages=int(stages), held=held)
    if not limit > 0:
        raise ScheduleError(
            f"{name} limits a rank to {limit:g} residuals", hint="give a number above 0, of stages' residuals"
        )
    return Copies(stages=int(stages), held=limit, strict=True)


def _refuse_other_limits(name: str, options: Mapping[str, float]) -> None:
    """Raises: ScheduleError if `fit` is no 1, or `limit` says something else."""
    if options[FIT] != 1 or LIMIT in options:
        raise ScheduleError(
            f"{name} fits its caps with fit={options[FIT]:g}"
            + (f" and limits a rank to {options[LIMIT]:g} residuals" if LIMIT in options else ""),
            hint="write fit=1, and leave out `limit`, which the caps say",
        )
