"""Spans: the events of a simulation as arrays; as objects only where somebody looks at them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np

from ..ir.columns import RECV_B_, RECV_F_, SEND_B_, SEND_F_, Bools, Codes, Columns, Floats, Ints, Longs
from ..ir.kernels import kernel
from ..ir.timeline import Event, EventLists, Lane, Totals


class _Texts(Sequence[str]):
    """Entries of columns as texts, each made when it is asked for."""

    def __init__(self, columns: Columns, entries: Longs) -> None:
        self._columns, self._entries = columns, entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> Any:
        chosen = self._columns.texts(np.atleast_1d(self._entries[at]))
        return chosen if isinstance(at, slice) else chosen[0]


class SimulatedEvents(Sequence[Event]):
    """Events of a program, by start.

    stream: by kind of the columns, the name of the stream it runs on.
    times: seconds: start and end per entry. If there are no starts, each entry starts when the one before it
        ends.
    message: per entry of a transfer, else -1.  moves: start and end in seconds per message.
    """

    def __init__(
        self,
        columns: Columns,
        stream: Sequence[str],
        times: tuple[Floats, Floats],
        message: Ints,
        moves: tuple[Floats, Floats],
    ) -> None:
        self._columns, self._stream, self._message = columns, tuple(stream), message
        self._noted, self._end = times
        self._moves = moves

    @property
    def _start(self) -> Floats:
        if len(self._noted):
            return self._noted
        start = np.roll(self._end, 1)
        first = self._columns.offsets[:-1]
        used = np.diff(self._columns.offsets) > 0
        start[first[used]] = 0.0
        return start

    @cached_property
    def _shown(self) -> Longs:
        """Entries that are events: of the receives those that wait."""
        kind = self._columns.kind
        receives = (kind == RECV_F_) | (kind == RECV_B_)
        return np.flatnonzero(~receives | (self._end > self._start))

    @property
    def _sends(self) -> Bools:
        kind = self._columns.kind
        sends: Bools = (kind == SEND_F_) | (kind == SEND_B_)
        return sends

    def listed(self, streams: Collection[str] = ()) -> EventLists:
        """What `Timeline.listed` are, without making an event."""
        columns, shown = self._columns, self._shown
        if streams:
            wanted = np.array([stream in streams for stream in self._stream])
            shown = shown[wanted[columns.kind[shown]]]
        start, end = self._start.copy(), self._end.copy()
        sends = self._sends
        start[sends], end[sends] = (moves[self._message[sends]] for moves in self._moves)
        order = shown[np.argsort(start[shown], kind="stable")]
        ranks = np.searchsorted(columns.offsets, order, side="right") - 1
        return EventLists(
            streams=[self._stream[code] for code in columns.kind[order].tolist()],
            ranks=ranks.tolist(),
            actions=columns.texts(order),
            starts=start[order].tolist(),
            ends=end[order].tolist(),
        )

    @cached_property
    def _events(self) -> tuple[Event, ...]:
        return tuple(
            Event(rank=rank, stream=stream, action=text, start_s=begin, end_s=until)
            for stream, rank, text, begin, until in zip(*self.listed(), strict=True)
        )

    def lanes(self) -> list[Lane]:
        """What `Timeline.lanes` are, without making an event."""
        columns, start = self._columns, self._start
        computes = np.array([name == "compute" for name in self._stream])[columns.kind]
        found = []
        for low, high in pairwise(columns.offsets.tolist()):
            entries = low + np.flatnonzero(computes[low:high])
            begin, end = start[entries], self._end[entries]
            kinds = columns.stage[entries].astype(np.int64) * len(columns.kinds) + columns.kind[entries]
            # One key for each stage, kind and whether it took time: the first entry of each.
            firsts = np.unique(2 * kinds + (end > begin), return_index=True)[1]
            found.append(Lane(begin, end, _Texts(columns, entries), np.sort(firsts).tolist()))
        return found

    def totals(self, ranks: int) -> Totals:
        """What `Timeline.totals` adds up, without making an event."""
        number = {"compute": 0, "recv": 1, "send": 2}
        stream = np.array([number.get(name, 3) for name in self._stream], np.int32)
        sums = np.zeros((4, ranks))
        sums[_FIRST], sums[_LAST] = np.inf, -np.inf
        columns = self._columns
        times = self._noted, self._end
        latest = _add_up(columns.kind, columns.offsets, stream, times, self._moves[1], sums)
        busy, wait, first, last = sums.tolist()
        return Totals(end_s=float(latest), busy_s=busy, wait_s=wait, first_s=first, last_s=last)

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
        return tuple(self) == tuple(other) if isinstance(other, SimulatedEvents | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._events)

    def __repr__(self) -> str:
        return repr(self._events) if len(self) <= 1000 else f"<{len(self)} events>"


_BUSY, _WAIT, _FIRST, _LAST = 0, 1, 2, 3


@kernel
def _add_up(
    kind: Codes,
    offsets: Longs,
    stream: Ints,
    times: tuple[Floats, Floats],
    move_end: Floats,
    sums: Floats,
) -> float:
    """Fill the sums of each rank. Returns when the last event ends."""
    noted, end = times
    latest = 0.0
    for rank in range(len(offsets) - 1):
        start = 0.0
        for entry in range(offsets[rank], offsets[rank + 1]):
            on = stream[kind[entry]]
            if len(noted):
                start = noted[entry]
            elif entry > offsets[rank]:
                start = end[entry - 1]
            if on == 2 and (kind[entry] == SEND_F_ or kind[entry] == SEND_B_):
                continue  # when it moves is in `move_end`
            if on <= 1:
                sums[on, rank] += end[entry] - start
            if on == 0:
                sums[_FIRST, rank] = min(sums[_FIRST, rank], start)
                sums[_LAST, rank] = max(sums[_LAST, rank], end[entry])
            latest = max(latest, end[entry])
    for message in range(len(move_end)):
        latest = max(latest, move_end[message])
    return latest
