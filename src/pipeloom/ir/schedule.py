"""Schedule: what each rank computes, in order. Program: the same with everything else made explicit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .action import Action, Instruction, parse_action, parse_instruction
from .errors import ScheduleError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """For each rank the ordered compute actions, and the rank of each stage.

    Transfers are not written here: they follow from the stage graph.
    slices: sequence slices of a micro-batch, where each is an action of its own: micro-batch b // slices,
        slice b % slices.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    """placement[stage] is the rank that runs it."""
    rows: tuple[tuple[Action, ...], ...]
    slices: int = 1

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

    def __str__(self) -> str:
        """One line per rank, actions separated by blanks."""
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def parse_rows(lines: tuple[str, ...]) -> tuple[tuple[Action, ...], ...]:
    """Read rows as `str(schedule)` prints them.

    >>> parse_rows(("0F0 0B0",))
    ((Action(stage=0, kind='F', microbatch=0), Action(stage=0, kind='B', microbatch=0)),)
    """
    return tuple(tuple(parse_action(word) for word in line.split()) for line in lines)


@dataclass(frozen=True, kw_only=True)
class Program:
    """For each rank everything it does in one step, in order.

    A RECV stands where the rank must have the message; runtimes post the receive earlier. The k-th SEND
    from one rank to another is matched by the k-th entry of `incoming` there, whatever the order in
    which the receiver waits.
    """

    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Instruction, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @cached_property
    def messages(self) -> dict[tuple[int, int], tuple[Instruction, ...]]:
        """(from rank, to rank) -> the SENDs in order: the one order both ends follow."""
        found: dict[tuple[int, int], list[Instruction]] = {}
        for rank, row in enumerate(self.rows):
            for step in row:
                if getattr(step, "sends", False):
                    found.setdefault((rank, self.placement[step.peer]), []).append(step)  # type: ignore[union-attr]
        return {pair: tuple(sends) for pair, sends in found.items()}


def parse_program(microbatches: int, placement: tuple[int, ...], lines: tuple[str, ...]) -> Program:
    """Read a program as `str(program)` prints it."""
    rows = tuple(tuple(parse_instruction(word) for word in line.split()) for line in lines)
    return Program(microbatches=microbatches, placement=placement, rows=rows)
