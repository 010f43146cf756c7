"""Rows by phases: made as columns, so that long ones take no longer than what is done with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from ...ir.action import Action, F, Kind, W
from ...ir.columns import CODE, Columns, Longs, Rows, columns_of, compute_columns
from ...ir.errors import ScheduleError
from .shape import Shape


class ActionLine(Sequence[Action]):
    """Actions of one kind as two arrays; they are made where somebody looks at them."""

    def __init__(self, kind: Kind, stage: Longs, microbatch: Longs) -> None:
        self.kind, self.stage, self.microbatch = kind, stage, microbatch

    def __len__(self) -> int:
        return len(self.stage)

    @overload
    def __getitem__(self, at: int) -> Action: ...
    @overload
    def __getitem__(self, at: slice) -> list[Action]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            pairs = zip(self.stage[at].tolist(), self.microbatch[at].tolist(), strict=True)
            return [Action(stage, self.kind, b) for stage, b in pairs]
        return Action(int(self.stage[at]), self.kind, int(self.microbatch[at]))

    def __add__(self, other: Sequence[Action]) -> list[Action]:
        return [*self, *other]


def turns(shape: Shape, rank: int, kind: Kind, group: int | None = None) -> ActionLine:
    """Actions of a rank, `group` micro-batches at a time per stage: forwards from its first stage on,
    backwards from its last."""
    size = group or shape.microbatches
    own = np.array(shape.rank_stages[rank] if kind == F else shape.rank_stages[rank][::-1], np.int64)
    # One entry per group, stage and place in the group; the last group may be shorter.
    low = np.arange(0, shape.microbatches, size)[:, None, None]
    microbatch = np.broadcast_to(low + np.arange(size), (len(low), len(own), size)).reshape(-1)
    stage = np.broadcast_to(own[:, None], (len(low), len(own), size)).reshape(-1)
    there = microbatch < shape.microbatches
    return ActionLine(kind, stage[there], microbatch[there])


def phases(
    shape: Shape,
    *,
    warm_up: Callable[[int], int],
    repeat: str,
    kinds: str = "FIW",
    forward: Callable[[int], Sequence[Action]] | None = None,
    backward: Callable[[int], Sequence[Action]] | None = None,
) -> Rows:
    """Rows by phases: some forwards, then a pattern until they are used up, then the rest.

    warm_up: rank -> forwards before the pattern begins.  repeat: such as "FB", "FIW" or "FI".
    forward, backward: rank -> its actions in the order of the phases; one micro-batch after the other,
        the stages of the rank in their order, unless given. W follows the order of I.
    Raises: ScheduleError if the pattern asks for more than there is, or for a kind that `kinds` lacks.

    >>> from pipeloom.schedules.registry import shape_of
    >>> for row in phases(shape_of(2, microbatches=2), warm_up=lambda r: 1 - r, repeat="FB", kinds="FB"):
    ...     print(*row)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    if kinds not in ("FB", "FI", "FIW"):
        raise ScheduleError(f"phases with kinds={kinds!r}", hint="use 'FB' or 'FIW'; 'FI' where W fills gaps")
    if unknown := [letter for letter in repeat if letter not in kinds]:
        raise ScheduleError(
            f"the pattern {repeat!r} has {unknown[0]!r}, but kinds={kinds!r}",
            hint="repeat only letters of kinds=, which is 'FIW' unless given: 'FB' for whole backwards",
        )
    last = Kind(kinds[1])
    parts: list[Columns] = []
    for rank in range(shape.ranks):
        ahead = _columns(forward(rank) if forward else turns(shape, rank, F))
        back = _columns(backward(rank) if backward else turns(shape, rank, last))
        late = compute_columns(np.full(len(back), CODE[W]), back.stage, back.microbatch, back.offsets)
        parts.append(_row({"F": ahead, str(last): back, "W": late}, warm_up(rank), repeat, str(last)))
    names = ("kind", "stage", "microbatch")
    kind, stage, microbatch = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    return Rows(compute_columns(kind, stage, microbatch, offsets))


def _row(queues: dict[str, Columns], warm_up: int, repeat: str, last: str) -> Columns:
    warm_up = min(warm_up, len(queues["F"]))
    times = -(-(len(queues["F"]) - warm_up) // max(1, repeat.count("F")))
    left = max(0, len(queues[last]) - times * repeat.count(last))
    drain = last + ("W" if "W" in repeat else "")
    # The row as a word, and for each letter the next action of its queue:
    #
    #     word    F  F  F  B  F  B  B  B         queues one after another   F0 F1 F2 F3 | B0 B1 B2 B3
    #     order   0  1  2  4  3  5  6  7         place of each letter's action in that
    #
    word = "F" * warm_up + repeat * times + drain * left
    letters = np.frombuffer(word.encode(), np.uint8)
    order = np.zeros(len(letters), np.int64)
    base = 0
    for letter, queue in queues.items():
        at = np.flatnonzero(letters == ord(letter))
        if len(at) > len(queue):
            raise ScheduleError(
                f"the pattern {repeat!r} takes {len(at)} times {letter}, and there are {len(queue)}",
                hint="repeat as many F as I or B",
            )
        order[at] = base + np.arange(len(at))
        base += len(queue)
    kind, stage, microbatch = (
        np.concatenate([getattr(q, name) for q in queues.values()])[order]
        for name in ("kind", "stage", "microbatch")
    )
    return compute_columns(kind, stage, microbatch, np.array([0, len(order)]))


def _columns(actions: Sequence[Action]) -> Columns:
    if isinstance(actions, ActionLine):
        kind = np.full(len(actions), CODE[actions.kind])
        return compute_columns(kind, actions.stage, actions.microbatch, np.array([0, len(actions)]))
    return columns_of([actions])


_WORD = re.compile(r"(\d+)([A-Z][A-Z_]*)(?:-(\d+))?")


def repeating(shape: Shape, turn: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Rows in which every rank runs its line of `turn` again and again, each time one micro-batch further.

    turn: a line per rank: `0F` is the forward of stage 0 for the micro-batch of the turn, `0B-3` the backward
        of the micro-batch three turns before. What has no micro-batch yet, or no more, is left out.
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
