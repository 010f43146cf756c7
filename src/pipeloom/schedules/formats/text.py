"""Schedules as text files: one row per rank, as `str(schedule)` prints them.

0F0 0F1 0F2&0B0 0B1 0B2         blanks between actions, & between the two of a pair
1F0 1B0 1COMPRESS0 1F1 1B1      kinds that a user declared are written like built-in ones
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.action import Action
from ...ir.errors import ScheduleError
from ...ir.schedule import Pair, Schedule, parse_pairs, parse_rows


def parse_text(text: str, *, name: str = "text") -> Schedule:
    """Read rows of actions; the rank of a stage is the row that it stands in. Empty lines are passed over.

    Raises: ScheduleError if a word is no action, with its row; or a stage stands in two rows.

    >>> parse_text("0F0 0B0\\n1F0 1B0\\n").placement
    (0, 1)
    """
    lines = tuple(line for line in text.splitlines() if line.strip())
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += parse_rows((line,))
        except ScheduleError as error:
            raise ScheduleError(f"row {number}: {error.message}", hint=error.hint) from None
    return from_rows(rows, parse_pairs(lines), name=name)


def from_rows(rows: Sequence[Sequence[Action]], pairs: Sequence[Pair], *, name: str) -> Schedule:
    """The schedule that has these rows, with as many stages and micro-batches as they name.

    Raises: ScheduleError if there is none, or a stage stands in two rows or in none.
    """
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if home.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} stands in the rows of ranks {home[action.stage]} and {rank}",
                    hint="give each stage one rank",
                )
    if not home:
        raise ScheduleError("there is no action in it", hint="write one row per rank, one action per cell")
    if sorted(home) != list(range(len(home))):
        raise ScheduleError("the stages are not numbered from 0 without gaps", hint="number them 0, 1, ...")
    return Schedule(
        name=name,
        microbatches=1 + max(action.microbatch for row in rows for action in row),
        placement=tuple(home[s] for s in range(len(home))),
        rows=tuple(map(tuple, rows)),
        pairs=tuple(pairs),
    )
