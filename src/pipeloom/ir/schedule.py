"""Schedule: what each rank computes, in order. Program: the same with everything else made explicit."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from .action import Action, parse_action, parse_actions
from .action_index import ActionIndex
from .columns import Columns, Rows, columns_of
from .errors import ScheduleError
from .flow import Flow
from .message_index import MessageIndex, index_messages

Pair: TypeAlias = tuple[Action, Action]
"""Two neighbours in a row that run as one unit, in this order; written `2F5&1B3`."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """For each rank the ordered compute actions, and the rank of each stage.

    Transfers are not written here: they follow from the stage graph.
    slices: sequence slices of a micro-batch, where each is an action of its own: micro-batch b // slices,
        slice b % slices.
    pairs: neighbours in a row that run as one unit: both begin when both can. They stand in the rows too.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    """placement[stage] is the rank that runs it."""
    rows: Sequence[tuple[Action, ...]]
    """A tuple, or a view of columns, see `ir.columns`."""
    slices: int = 1
    pairs: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ScheduleError(f"{self.microbatches} micro-batches", hint="use at least 1")
        if self.slices < 1 or self.microbatches % self.slices:
            raise ScheduleError(
                f"{self.microbatches} actions per stage for {self.slices} slices a micro-batch",
                hint="let the slices divide them",
            )
        if not self.rows:
            raise ScheduleError("a schedule without ranks", hint="give one row of actions per rank")

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def columns(self) -> Columns:
        return columns_of(self.rows)

    @cached_property
    def action_index(self) -> ActionIndex:
        """Where all compute actions stand. Only of a schedule whose stages and micro-batches are in range."""
        return ActionIndex(self.columns, stages=self.stages, microbatches=self.microbatches)

    def locate(self, entry: int) -> tuple[int, Action]:
        """Rank and action of an entry of the columns, as the schedule was given."""
        rank = self.columns.rank_of(entry)
        return rank, self.rows[rank][entry - int(self.columns.offsets[rank])]

    def __str__(self) -> str:
        return rows_text(self.rows, self.pairs)


def rows_text(rows: Sequence[Sequence[Action]], pairs: tuple[Pair, ...]) -> str:
    """One line per rank."""
    if isinstance(rows, Rows) and not pairs:
        return "\n".join(" ".join(rows.columns.row_texts(rank)) for rank in range(len(rows)))
    if not pairs:
        return "\n".join(" ".join(map(str, row)) for row in rows)
    joined = {(str(first), str(second)) for first, second in pairs}
    return "\n".join(_line([str(step) for step in row], joined) for row in rows)


def _line(words: Sequence[str], joined: Set[tuple[str, str]]) -> str:
    """A pair is printed where its two follow each other: rows that no check has seen may repeat an action."""
    parts, inside = [], False
    for word, following in zip(words, [*words[1:], ""], strict=False):
        inside = not inside and (word, following) in joined
        parts.append(f"{word}{'&' if inside else ' '}")
    return "".join(parts).rstrip()


def parse_rows(lines: tuple[str, ...]) -> tuple[tuple[Action, ...], ...]:
    """Read rows as `str(schedule)` prints them; for their pairs see `parse_pairs`.

    >>> [str(action) for row in parse_rows(("0F0 0B0", "1F0")) for action in row]
    ['0F0', '0B0', '1F0']
    """
    return tuple(tuple(action for word in line.split() for action in parse_actions(word)) for line in lines)


def parse_pairs(lines: tuple[str, ...]) -> tuple[Pair, ...]:
    """The pairs in rows as `str(schedule)` prints them.

    >>> [" and ".join(map(str, pair)) for pair in parse_pairs(("0F0 0F1&0B0 0B1",))]
    ['0F1 and 0B0']
    """
    words = [word for line in lines for word in line.split() if "&" in word]
    return tuple((first, second) for first, second in map(parse_actions, words))


@dataclass(frozen=True, kw_only=True)
class Program(Schedule):
    """For each rank everything it does in one step, in order.

    A RECV stands where the rank must have the message; runtimes post the receive earlier. The k-th SEND
    from one rank to another is matched by the k-th entry of `incoming` there, whatever the order in
    which the receiver waits.
    pairs: as in the schedule. What a pair waits for stands in front of it, and what it sends behind it.
    every: micro-batches per update of each replica, in a program of several updates; None where the only one
        ends it.  clips: each of several updates awaits a sum over all ranks.
    """

    name: str = "program"
    every: int | None = None
    clips: bool = False

    @property
    def updates(self) -> tuple[int, ...]:
        """The numbers of its updates, as REDUCE and STEP have them: -1 for the only one."""
        return (-1,) if self.every is None else tuple(range(self.microbatches // self.every))

    def message_index(self, flow: Flow) -> MessageIndex:
        """The routes that its transfers follow, and both ends of each message; found once per flow."""
        cached: tuple[Flow, MessageIndex] | None = self.__dict__.get("_message_index")
        if cached is None or (cached[0] is not flow and cached[0] != flow):
            cached = flow, index_messages(self.columns, self.microbatches, flow)
            self.__dict__["_message_index"] = cached
        return cached[1]

    @cached_property
    def messages(self) -> dict[tuple[int, int], tuple[Action, ...]]:
        """(from rank, to rank) -> the SENDs in order: the one order both ends follow."""
        sends: dict[tuple[int, int], list[Action]] = {}
        for rank, row in enumerate(self.rows):
            for step in row:
                if step.sends:
                    sends.setdefault((rank, self.placement[step.peer]), []).append(step)
        return {pair: tuple(steps) for pair, steps in sends.items()}


def parse_program(microbatches: int, placement: tuple[int, ...], lines: tuple[str, ...]) -> Program:
    rows = tuple(
        tuple(
            step
            for word in line.split()
            for step in (parse_actions(word) if "&" in word else (parse_action(word, in_program=True),))
        )
        for line in lines
    )
    return Program(microbatches=microbatches, placement=placement, rows=rows, pairs=parse_pairs(lines))
