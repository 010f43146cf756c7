"""Spans: the events of a simulation as arrays; as objects only where somebody looks at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .columns import RECV_B_, RECV_F_, SEND_B_, SEND_F_, Bools, Columns, Ints
from .timeline import Event, Totals

Floats = NDArray[np.float64]


class Spans(Sequence[Event]):
    """Events of a program, by start.

    stream: by kind of the columns, the name of the stream it runs on.  start, end: seconds per entry.
    message: per entry of a transfer, else -1.  move_start, move_end: seconds per message.
    """

    def __init__(
        self, columns: Columns, stream: Sequence[str], times: tuple[Floats, Floats], message: Ints,
        moves: tuple[Floats, Floats],
    ) -> None:  # fmt: skip
        self._columns, self._stream, self._message = columns, tuple(stream), message
        self._start, self._end = times
        self._moves = moves

    @cached_property
    def _shown(self) -> NDArray[np.int64]:
        """Entries that are events: of the receives those that wait."""
        kind = self._columns.kind
        receives = (kind == RECV_F_) | (kind == RECV_B_)
        return np.flatnonzero(~receives | (self._end > self._start))

    @property
    def _sends(self) -> Bools:
        kind = self._columns.kind
        sends: Bools = (kind == SEND_F_) | (kind == SEND_B_)
        return sends

    @cached_property
    def _events(self) -> tuple[Event, ...]:
        columns, shown = self._columns, self._shown
        start, end = self._start.copy(), self._end.copy()
        sends = self._sends
        start[sends], end[sends] = (moves[self._message[sends]] for moves in self._moves)
        order = shown[np.argsort(start[shown], kind="stable")]
        ranks = np.searchsorted(columns.offsets, order, side="right") - 1
        rows = zip(order.tolist(), ranks.tolist(), start[order].tolist(), end[order].tolist(), strict=True)
        return tuple(
            Event(
                rank=rank, stream=self._stream[columns.kind[entry]], action=str(columns.at(entry)),
                start_s=begin, end_s=until,
            )
            for entry, rank, begin, until in rows
        )  # fmt: skip

    def totals(self, ranks: int) -> Totals:
        """What `Timeline.totals` adds up, without making an event."""
        columns = self._columns
        own = np.repeat(np.arange(ranks), np.diff(columns.offsets))
        number = {"compute": 0, "recv": 1}
        stream = np.array([number.get(name, 2) for name in self._stream])[columns.kind]
        took = self._end - self._start
        computes = stream == 0
        waits = stream == 1

        def added(which: Bools) -> list[float]:
            found: list[float] = np.bincount(own[which], took[which], minlength=ranks).tolist()
            return found

        first, last = np.full(ranks, np.inf), np.full(ranks, -np.inf)
        at = np.flatnonzero(computes)
        np.minimum.at(first, own[at], self._start[at])
        np.maximum.at(last, own[at], self._end[at])
        ends = [float(part.max()) for part in (self._end[~self._sends], self._moves[1]) if part.size]
        return Totals(
            step_s=max(ends, default=0.0), busy_s=added(computes), wait_s=added(waits),
            first_s=first.tolist(), last_s=last.tolist(),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._shown)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @overload
    def __getitem__(self, at: int) -> Event: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, at: int | slice) -> Any:
        return self._events[at]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Spans | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._events)

    def __repr__(self) -> str:
        return repr(self._events) if len(self) <= 1000 else f"<{len(self)} events>"
