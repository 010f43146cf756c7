"""Steady rows: what each rank runs for one batch while the pipeline never drains, and to drain it.

A steady step (`ir.steady`) is unrolled and lowered as any schedule; each rank's row is then cut at the ends
of its steps. From the row in which the pipeline is full on, all rows are the same but for their numbers, so a
run of any length is put together from few of them:

    batch        0        1       2       3      ...      n - 1
    row       lead-in    full    full    full    ...      full    | drain

Numbers are taken modulo the window, since no two micro-batches that are alive meet there: with m of them per
step and a window of w steps, batch b has the numbers (b mod w) * m to (b mod w) * m + m - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir.action import AWAIT, OFFLOAD, Action, B, F, I, W
from ..ir.errors import ScheduleError
from ..ir.memory_policy import KEEP_ALL, MemoryPolicy
from ..ir.operation import follows_anchor
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..ir.steady import SteadyStep
from ..ir.weight_policies import Updates
from .passes import lower

Cut = tuple[tuple[Action, ...], ...]
"""One rank's row, cut into steps."""


@dataclass(frozen=True, kw_only=True)
class SteadyRow:
    """One row of every rank, numbered modulo the window. incoming: rank -> the SENDs that it receives in this
    row, per sender in the order sent."""

    program: Program
    incoming: Mapping[int, tuple[Action, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SteadyRows:
    """The rows of a steady step, each made when it is first asked for.

    clips: updates await the norm of all gradients.
    Raises: ScheduleError if messages would overtake each other from one row to the next.
    """

    step: SteadyStep
    stages: StageGraph
    updates: Updates
    policy: MemoryPolicy = KEEP_ALL
    clips: bool = False
    _programs: dict[int, tuple[Program, list[Cut]]] = field(default_factory=dict, repr=False)
    _rows: dict[tuple[int, int, bool], SteadyRow] = field(default_factory=dict, repr=False)

    @property
    def full_from(self) -> int:
        return 2 * self.step.window

    def row(self, batch: int, fed: int) -> SteadyRow:
        """What runs when batch number `batch` is fed, and `fed` were since the pipeline was last empty."""
        at = min(fed, self.full_from)
        key = batch % self.step.window, at, False
        if key not in self._rows:
            _, cut = self._cut(self.full_from + 2 * self.step.window)
            self._rows[key] = self._made([row[at] for row in cut], batch - at, cut, at)
        return self._rows[key]

    def drain(self, batch: int, fed: int) -> SteadyRow:
        """What is left to run once no batch comes after `batch`."""
        count = min(fed, self.full_from + 1)
        key = batch % self.step.window, count, True
        if key not in self._rows:
            _, long = self._cut(self.full_from + 2 * self.step.window)
            _, cut = self._cut(count)
            rows = []
            for steps, all_steps in zip(cut, long, strict=True):
                done = {instruction for row in all_steps[:count] for instruction in row}
                rows.append(tuple(i for row in steps for i in row if i not in done))
            self._rows[key] = self._made(rows, batch - (count - 1), long, None)
        return self._rows[key]

    def _cut(self, steps: int) -> tuple[Program, list[Cut]]:
        if steps not in self._programs:
            schedule = self.step.unroll(steps)
            program = lower(schedule, self.stages, policy=self.policy, updates=self.updates, clips=self.clips)
            count = steps + self.step.window - 1
            rows = []
            for rank, row in enumerate(program.rows):
                sizes = [sum(map(_computes, self.step.row(rank, step, steps))) for step in range(count)]
                rows.append(_cut_row(row, sizes))
            self._programs[steps] = program, rows
        return self._programs[steps]

    def _made(
        self, rows: Sequence[tuple[Action, ...]], shift: int, cut: list[Cut], at: int | None
    ) -> SteadyRow:
        """shift: the batch that has number 0 in these rows.  at: which row of `cut` they are."""
        long, _ = self._cut(self.full_from + 2 * self.step.window)
        order: dict[Action, int] = {}
        for row in long.rows:
            order.update({step: n for n, step in enumerate(row) if step.sends})
        incoming: dict[int, tuple[Action, ...]] = {}
        for rank, row in enumerate(rows):
            sends = [step.other_end for step in row if step.receives]
            incoming[rank] = tuple(sorted(sends, key=order.__getitem__))
            if at is not None:
                self._refuse_overtaking(rank, incoming[rank], cut[rank][at + 1 :], order)
        window, every = self.step.window, self.step.microbatches

        def numbered(step: Action) -> Action:
            of_each = 1 if step.is_stage_wide else every
            return replace(step, microbatch=(step.microbatch + shift * of_each) % (window * of_each))

        renamed = {rank: tuple(map(numbered, sends)) for rank, sends in incoming.items()}
        program = Program(
            microbatches=window * every,
            placement=self.step.placement,
            rows=tuple(tuple(map(numbered, row)) for row in rows),
            every=every,
            clips=self.clips,
        )
        return SteadyRow(program=program, incoming=renamed)

    def _refuse_overtaking(
        self, rank: int, sends: Sequence[Action], later: Cut, order: Mapping[Action, int]
    ) -> None:
        """Messages of one sender arrive in the order sent: none of a later row may have been sent before."""
        latest: dict[int, Action] = {}
        for send in sends:
            latest[self.step.placement[send.stage]] = send
        for row in later:
            for step in row:
                if not step.receives:
                    continue
                send = step.other_end
                before = latest.get(self.step.placement[send.stage])
                if before is not None and order[send] < order[before]:
                    raise ScheduleError(
                        f"rank {rank} receives {before} in one step and {send}, which was sent before it, in "
                        "a later one",
                        hint="use --weights flush, or a schedule such as 1f1b",
                    )


def _cut_row(row: tuple[Action, ...], sizes: Sequence[int]) -> Cut:
    """Cut a row behind so many computing actions each, with what they send, copy out and update then."""
    ends, counted, at = [], 0, 0
    for size in sizes:
        counted += size
        while counted:
            step = row[at]
            counted -= _computes(step)
            at += 1
        while at < len(row) and _belongs_before(row[at]):
            at += 1
        ends.append(at)
    ends[-1] = len(row)
    return tuple(row[low:high] for low, high in zip([0, *ends], ends, strict=False))


def _computes(step: Action) -> bool:
    return step.kind in (F, B, I, W)


def _belongs_before(step: Action) -> bool:
    return step.sends or step.is_stage_wide or step.kind in (OFFLOAD, AWAIT) or follows_anchor(step.kind)
