"""Action index: where in its columns each stage runs each kind on each micro-batch."""

from __future__ import annotations

import numpy as np

from .columns import B_, I_, Columns, Ints

NOWHERE = -1


class ActionIndex:
    """Tables of shape (stages, micro-batches), one per kind, of entries of the columns; -1 where none is.

    Stages and micro-batches of all compute actions must be in range. Of something that stands twice the
    last entry is kept.

    >>> from .columns import F_, columns_of
    >>> from .schedule import parse_rows
    >>> columns = columns_of(parse_rows(("0F1 0F0",)))
    >>> ActionIndex(columns, stages=1, microbatches=3).of(F_).tolist()
    [[1, 0, -1]]
    """

    def __init__(self, columns: Columns, *, stages: int, microbatches: int) -> None:
        self._columns = columns
        self._shape = (stages, microbatches)
        self._tables: dict[int, Ints] = {}
        self.counted: dict[int, int] = {}

    def of(self, code: int) -> Ints:
        """The table of one kind. `counted[code]` then says how many such entries there are."""
        if code not in self._tables:
            entries = np.flatnonzero(self._columns.kind == code)
            self.counted[code] = len(entries)
            if len(entries):
                table = np.full(self._shape, NOWHERE, np.int32)
                table[self._columns.stage[entries], self._columns.microbatch[entries]] = entries
            else:  # one number, seen as a table: large schedules lack several kinds
                table = np.broadcast_to(np.int32(NOWHERE), self._shape)
            self._tables[code] = table  # last: other threads take it as soon as it is there
        return self._tables[code]

    def gradients(self) -> Ints:
        """The entries that make gradients: B, or I."""
        whole, split = self.of(B_), self.of(I_)
        if not (self.counted[B_] and self.counted[I_]):
            return whole if self.counted[B_] else split
        return np.where(whole >= 0, whole, split)
