"""Pipe: the messages from one rank to another, in the sender's order, one at a time on their link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.action import Transfer


class Pipe:
    """When each message moves: once it is sent, its receive is posted, and the one before it is through.

    >>> from pipeloom.ir.action import SEND_F
    >>> pipe = Pipe([Transfer(0, SEND_F, 0, 1), Transfer(0, SEND_F, 1, 1)], [2.0, 2.0])
    >>> pipe.sent += [1.0, 1.5]
    >>> pipe.posted += [0.0]
    >>> [(str(message), start, end) for message, start, end in pipe.moves()]
    [('0SEND_F0>1', 1.0, 3.0)]
    >>> pipe.posted += [9.0]
    >>> [(str(message), start, end) for message, start, end in pipe.moves()]
    [('0SEND_F1>1', 9.0, 11.0)]
    """

    def __init__(self, messages: Sequence[Transfer], seconds: Sequence[float]) -> None:
        self.messages = messages
        self.place = {message: index for index, message in enumerate(messages)}
        self.sent: list[float] = []
        self.posted: list[float] = []
        self.received = 0
        self._seconds = seconds
        self._moved = 0
        self._free = 0.0

    def moves(self) -> Iterator[tuple[Transfer, float, float]]:
        """The messages whose start and end have become known since the last call."""
        while self._moved < min(len(self.sent), len(self.posted)):
            index = self._moved
            start = max(self.sent[index], self.posted[index], self._free)
            self._free = start + self._seconds[index]
            self._moved += 1
            yield self.messages[index], start, self._free
