"""Wiring: the lines between stages that a program sends along, and where each message is sent and received.

A line is one direction between two stages: outputs forward, or gradients backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .columns import RECV_B_, RECV_F_, SEND_B_, SEND_F_, Bools, Codes, Columns, Ints, starts_of
from .flow import Flow
from .kernels import in_place

NO_LINE = -2
"""In place of a line: a transfer that follows none; -1 is no transfer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """All lines of a flow, forward ones first, each part sorted by sender and receiver (both stages)."""

    sender: Ints
    receiver: Ints
    backward: Bools
    first: Ints
    """Lines from stage s are `first[s] : first[s + 1]` forward, `first[stages + s] : ...` backward."""

    def __len__(self) -> int:
        return len(self.sender)

    def between(self, sender: int, receiver: int, *, backward: bool) -> int:
        """The line from one stage to another; there must be one."""
        row = sender + backward * (len(self.first) // 2)
        low, high = int(self.first[row]), int(self.first[row + 1])
        return low + int(np.searchsorted(self.receiver[low:high], receiver))


def lines_of(flow: Flow) -> Lines:
    """The lines that values and gradients can take.

    >>> from .flow import dag, flow_of
    >>> lines = lines_of(flow_of(dag(3, [(0, 1), (0, 2), (1, 2)], no_gradient=[(0, 2)])))
    >>> list(zip(lines.sender.tolist(), lines.receiver.tolist()))
    [(0, 1), (0, 2), (1, 2), (1, 0), (2, 1)]
    """
    targets = [sorted(t) for neighbours in (flow.read_by, flow.gradients_to) for t in neighbours]
    stages = len(flow.order)
    pairs = [(row % stages, receiver) for row, found in enumerate(targets) for receiver in found]
    sender, receiver = np.array(pairs, np.int32).reshape(-1, 2).T
    forward = sum(map(len, flow.read_by))
    return Lines(
        sender=sender.copy(),
        receiver=receiver.copy(),
        backward=np.arange(len(pairs)) >= forward,
        first=starts_of([len(found) for found in targets]),
    )


@dataclass(kw_only=True, eq=False)
class Wiring:
    """lines: of the stage graph.  line: of each entry of the columns, -1 for no transfer, `NO_LINE` for one
    that follows no line.  sent, received: entries of shape (lines, micro-batches), -1 where there is none; of
    something that stands twice the last.  sound: whether the checks have found everything in range and both
    ends of every message.  numbers: kept here by the simulator, which numbers messages in the order sent: the
    message of each entry, the line of each message, the steps of its event loop, and whether messages are
    received in the order sent."""

    lines: Lines
    line: Ints
    sent: Ints
    received: Ints
    sound: bool = False
    numbers: tuple[Ints, Ints, Ints, bool] | None = None


def wire(columns: Columns, microbatches: int, flow: Flow) -> Wiring:
    """Find the line of each transfer, and both ends of each message. Micro-batches out of range are passed
    over."""
    lines = lines_of(flow)
    line = np.full(len(columns), -1, np.int32)
    _find_lines((columns.kind, columns.stage, columns.peer), lines.first, lines.receiver, line)
    sent, received = (np.full((len(lines), microbatches), -1, np.int32) for _ in range(2))
    _find_ends(columns.kind, columns.microbatch, line, sent, received)
    return Wiring(lines=lines, line=line, sent=sent, received=received)


@in_place
def _find_lines(columns: tuple[Codes, Ints, Ints], first: Ints, receiver: Ints, line: Ints) -> None:
    kind, stage, peer = columns
    stages = len(first) // 2
    for entry in range(len(kind)):
        code = kind[entry]
        if code < SEND_F_ or code > RECV_B_:
            continue
        sends = code == SEND_F_ or code == SEND_B_
        a = stage[entry] if sends else peer[entry]
        b = peer[entry] if sends else stage[entry]
        line[entry] = NO_LINE
        if a < 0 or a >= stages:
            continue
        row = a if code <= RECV_F_ else stages + a
        low, high = first[row], first[row + 1]
        while low < high:
            middle = (low + high) // 2
            if receiver[middle] < b:
                low = middle + 1
            else:
                high = middle
        if low < first[row + 1] and receiver[low] == b:
            line[entry] = low


@in_place
def _find_ends(kind: Codes, microbatch: Ints, line: Ints, sent: Ints, received: Ints) -> None:
    microbatches = sent.shape[1]
    for entry in range(len(kind)):
        if line[entry] < 0 or microbatch[entry] < 0 or microbatch[entry] >= microbatches:
            continue
        if kind[entry] == SEND_F_ or kind[entry] == SEND_B_:
            sent[line[entry], microbatch[entry]] = entry
        else:
            received[line[entry], microbatch[entry]] = entry


def far(placement: Sequence[int], stage: int, peers: Sequence[int]) -> list[int]:
    """Those of a stage's neighbours that are on another rank."""
    return [peer for peer in peers if placement[peer] != placement[stage]]
