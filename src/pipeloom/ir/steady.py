"""Steady steps: the one step that a pipeline which never drains repeats, and what follows from it.

While the pipeline stays full, the last backwards of the steps before stand beside the forwards of this one:

    1F1B, 3 stages, 4 micro-batches per step          body of rank 0        0F8 0B6 0F9 0B7 0F10 0B8 0F11 0B9

Micro-batches are numbered within a window of `window` steps: with m per step, numbers (window - 1) * m and
above are this step's, and those below belong to the steps before. Leaving out what belongs to steps that do
not exist gives the lead-in, in front of the first full step, and the drain, behind the last one:

    unrolled over n steps     lead-in | body | body | ... | drain
    row t of a rank           the body, its numbers raised by (t - window + 1) * m, without what is outside
                              0 ... n * m - 1;  t = 0 ... n + window - 2

Source: the 1F1B order without flushes of PipeDream-2BW (arXiv 2006.09503, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .action import Action, B, F, W
from .errors import ScheduleError
from .schedule import Pair, Schedule, parse_pairs, parse_rows, rows_text

MOST_WINDOW = 1000
"""More steps in flight at once are refused: a number in a file would decide how long planning takes."""


@dataclass(frozen=True, kw_only=True)
class SteadyStep:
    """The step that a schedule without a flush repeats.

    microbatches: per step, of each replica.  rows: per rank the actions of one step, numbered as the module
        says.  window: steps whose micro-batches stand in it, this one included.
    Raises: ScheduleError if a number is outside the window.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    rows: Sequence[tuple[Action, ...]]
    pairs: tuple[Pair, ...] = ()
    window: int = 2

    def __post_init__(self) -> None:
        limit = self.window * self.microbatches
        for rank, row in enumerate(self.rows):
            for action in row:
                if not 0 <= action.microbatch < limit:
                    raise ScheduleError(
                        f"rank {rank} runs {action}, but a steady step of {self.microbatches} micro-batches "
                        f"numbers them 0 to {limit - 1}",
                        hint="number those of the step before from 0, and this step's behind them",
                    )

    def __str__(self) -> str:
        """As a schedule."""
        return rows_text(self.rows, self.pairs)

    def row(self, rank: int, step: int, steps: int) -> tuple[Action, ...]:
        """What a rank does in row `step` of `steps` steps, numbered from the first micro-batch of all.

        >>> body = SteadyStep(name="", microbatches=1, placement=(0,), rows=parse_rows(("0F1 0B0",)))
        >>> [" ".join(map(str, body.row(0, t, 2))) for t in range(3)]
        ['0F0', '0F1 0B0', '0B1']
        """
        shift, total = (step - self.window + 1) * self.microbatches, steps * self.microbatches
        moved = (replace(action, microbatch=action.microbatch + shift) for action in self.rows[rank])
        return tuple(action for action in moved if 0 <= action.microbatch < total)

    def unroll(self, steps: int) -> Schedule:
        """An ordinary schedule of so many steps, with lead-in and drain.

        >>> body = SteadyStep(name="", microbatches=1, placement=(0,), rows=parse_rows(("0F1 0B0",)))
        >>> print(body.unroll(3))
        0F0 0F1 0B0 0F2 0B1 0B2
        """
        if steps < 1:
            raise ScheduleError(f"{steps} steps", hint="unroll at least 1")
        count = steps + self.window - 1
        rows = tuple(
            tuple(action for step in range(count) for action in self.row(rank, step, steps))
            for rank in range(len(self.rows))
        )
        pairs = []
        for shift in (step * self.microbatches for step in range(1 - self.window, steps)):
            for both in self.pairs:
                moved = [replace(action, microbatch=action.microbatch + shift) for action in both]
                if all(0 <= action.microbatch < steps * self.microbatches for action in moved):
                    pairs.append((moved[0], moved[1]))
        return Schedule(
            name=self.name,
            microbatches=steps * self.microbatches,
            placement=self.placement,
            rows=rows,
            pairs=tuple(pairs),
        )

    @cached_property
    def unrolled(self) -> Schedule:
        """As many steps as a plan is judged by: in the middle third no rank is still filling, and none is
        draining yet."""
        return self.unroll(3 * self.window)


def parse_steady(
    lines: tuple[str, ...], *, name: str, microbatches: int, placement: tuple[int, ...]
) -> SteadyStep:
    """Read the rows of a steady step, as `str` prints them. Raises: ScheduleError."""
    rows = parse_rows(lines)
    most = max((action.microbatch for row in rows for action in row), default=0)
    if most >= MOST_WINDOW * microbatches:
        raise ScheduleError(
            f"a step of {microbatches} micro-batches runs micro-batch {most}: "
            f"{most // microbatches + 1} steps would be in flight at once",
            hint="number those of the steps before from 0, and this step's behind them",
        )
    return SteadyStep(
        name=name,
        microbatches=microbatches,
        placement=placement,
        rows=rows,
        pairs=parse_pairs(lines),
        window=max(2, most // microbatches + 1),
    )


def steady_step(schedule: Schedule, microbatches: int) -> SteadyStep:
    """The step that a long schedule repeats every so many micro-batches, found in its middle.

    Each rank's row is cut in front of the first forward of every step.
    Raises: ScheduleError if the schedule does not repeat, such as GPipe, whose backwards come last.

    >>> from pipeloom.ir.schedule import parse_rows
    >>> rows = parse_rows(("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0F5 0B4 0B5",))
    >>> print(steady_step(Schedule(name="", microbatches=6, placement=(0,), rows=rows), 1))
    0F1 0B0
    """
    steps, rest = divmod(schedule.microbatches, microbatches)
    if rest or schedule.slices != 1 or steps < 4:
        raise ScheduleError(
            f"{schedule.microbatches} micro-batches in {schedule.slices} slices are no schedule of at least "
            f"4 steps of {microbatches}",
            hint="build it for more steps, of whole micro-batches",
        )
    middle = steps // 2
    rows = [_windows(row, rank, microbatches, schedule) for rank, row in enumerate(schedule.rows)]
    oldest = min(action.microbatch for row in rows for action in row[middle])
    window = max(2, middle + 1 - oldest // microbatches)

    def numbered(row: Sequence[Action], step: int) -> tuple[Action, ...]:
        shift = (window - 1 - step) * microbatches
        return tuple(replace(action, microbatch=action.microbatch + shift) for action in row)

    body = [numbered(row[middle], middle) for row in rows]
    for rank, row in enumerate(rows):
        kinds = [action.kind for action in body[rank]]
        one_sided = schedule.columns.trains and kinds.count(F) != kinds.count(B) + kinds.count(W)
        if one_sided or numbered(row[middle - 1], middle - 1) != body[rank]:
            raise ScheduleError(
                f"schedule {schedule.name} does not repeat every {microbatches} micro-batches on rank "
                f"{rank}, so it cannot run without a flush",
                hint="use --weights flush, or a schedule such as 1f1b",
            )
    inside = [pair for pair in schedule.pairs if pair[0] in rows[schedule.placement[pair[0].stage]][middle]]
    return SteadyStep(
        name=schedule.name,
        microbatches=microbatches,
        placement=schedule.placement,
        rows=tuple(body),
        pairs=tuple((a, b) for a, b in (numbered(pair, middle) for pair in inside)),
        window=window,
    )


def _windows(
    row: Sequence[Action], rank: int, microbatches: int, schedule: Schedule
) -> list[tuple[Action, ...]]:
    """A rank's row, cut in front of the first forward of every step."""
    starts, seen = [], -1
    for at, action in enumerate(row):
        step = action.microbatch // microbatches
        if action.kind == F and step > seen:
            starts.append(at)
            seen = step
    if len(starts) != schedule.microbatches // microbatches:
        raise ScheduleError(
            f"rank {rank} does not begin the steps of {schedule.name} one after the other",
            hint="use a schedule whose forwards come in the order of their micro-batches, such as 1f1b",
        )
    starts[0] = 0
    return [tuple(row[low:high]) for low, high in zip(starts, [*starts[1:], len(row)], strict=True)]
