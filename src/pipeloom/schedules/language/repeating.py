"""Repeating orders as text: what every rank runs in one turn."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...ir.action import Action, Kind
from ...ir.errors import ScheduleError
from .shape import Shape

_WORD = re.compile(r"(\d+)([A-Z][A-Z_]*)(?:-(\d+))?")


def repeating(shape: Shape, turn: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Rows in which every rank runs its line of `turn` again and again, each time one micro-batch further.

    turn: a line per rank: `0F` is the forward of stage 0 for the micro-batch of the turn, `0B-3` the
    backward of
        the micro-batch three turns before. What has no micro-batch yet, or no more, is left out.
    Raises: ScheduleError if a word cannot be read, or there is not one line per rank.

    >>> from pipeloom.schedules.registry import shape_of
    >>> for row in repeating(shape_of(2, microbatches=3), ["0F 0B-1", "1F 1B"]):
    ...     print(*row)
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    if len(turn) != shape.ranks:
        raise ScheduleError(f"{len(turn)} lines for {shape.ranks} ranks", hint="give one line per rank")
    lines = [[_read(word) for word in line.split()] for line in turn]
    last = shape.microbatches + max((late for line in lines for _, _, late in line), default=0)
    return tuple(
        tuple(
            Action(stage, kind, number - late)
            for number in range(last)
            for stage, kind, late in line
            if 0 <= number - late < shape.microbatches
        )
        for line in lines
    )


def _read(word: str) -> tuple[int, Kind, int]:
    found = _WORD.fullmatch(word)
    if found is None:
        raise ScheduleError(f"cannot read {word!r} in a turn", hint="write 0F, or 0B-3 for three turns later")
    return int(found[1]), Kind(found[2]), int(found[3] or 0)
