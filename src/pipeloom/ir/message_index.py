"""Message index: the routes that a program sends along, and where each message is sent and received.

A route is one direction between two stages: outputs forward, or gradients backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .columns import RECV_B_, RECV_F_, SEND_B_, SEND_F_, Bools, Codes, Columns, Ints, Longs, starts_of
from .flow import Flow
from .kernels import kernel

NO_ROUTE = -2
"""In place of a route: a transfer that follows none; -1 is no transfer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """All routes of a flow, forward ones first, each part sorted by sender and receiver (both stages)."""

    sender: Ints
    receiver: Ints
    backward: Bools
    first: Ints
    """Routes from stage s are `first[s] : first[s + 1]` forward, `first[stages + s] : ...` backward."""

    def __len__(self) -> int:
        return len(self.sender)

    def between(self, sender: int, receiver: int, *, backward: bool) -> int:
        """The route from one stage to another; there must be one."""
        row = sender + backward * (len(self.first) // 2)
        low, high = int(self.first[row]), int(self.first[row + 1])
        return low + int(np.searchsorted(self.receiver[low:high], receiver))


def routes_of(flow: Flow) -> Routes:
    """
    >>> from .flow import dag, flow_of
    >>> routes = routes_of(flow_of(dag(3, [(0, 1), (0, 2), (1, 2)], no_gradient=[(0, 2)])))
    >>> list(zip(routes.sender.tolist(), routes.receiver.tolist()))
    [(0, 1), (0, 2), (1, 2), (1, 0), (2, 1)]
    """
    targets = [sorted(t) for neighbours in (flow.read_by, flow.gradients_to) for t in neighbours]
    stages = len(flow.order)
    pairs = [(row % stages, receiver) for row, peers in enumerate(targets) for receiver in peers]
    sender, receiver = np.array(pairs, np.int32).reshape(-1, 2).T
    forward = sum(map(len, flow.read_by))
    return Routes(
        sender=sender.copy(),
        receiver=receiver.copy(),
        backward=np.arange(len(pairs)) >= forward,
        first=starts_of([len(peers) for peers in targets]),
    )


class EventCodes(NamedTuple):
    """A program as the simulator's event loop reads it. Messages are numbered in the order sent.

    message: per entry, -1 for no transfer.  route: per message.  code: per entry, see `simulator.loop_state`.
    in_order: whether ranks receive messages in the order sent.  upto: see `simulator.loop_state`.
    """

    message: Ints
    route: Ints
    code: Ints
    in_order: bool
    upto: Longs


@dataclass(kw_only=True, eq=False)
class MessageIndex:
    """Where each message of a program is sent and received.

    route: per entry of the columns the number of its route, -1 for no transfer, `NO_ROUTE` for one without.
    sent, received: of shape (routes, micro-batches), the entries of SEND and RECV, -1 where there is none.
        Of what stands twice the last one.
    event_codes: kept here by the simulator, which makes it from a program once.
    """

    routes: Routes
    route: Ints
    sent: Ints
    received: Ints
    event_codes: EventCodes | None = None


def index_messages(columns: Columns, microbatches: int, flow: Flow) -> MessageIndex:
    """Find the route of each transfer, and both ends of each message. Micro-batches out of range are passed
    over."""
    routes = routes_of(flow)
    route = np.full(len(columns), -1, np.int32)
    _find_routes((columns.kind, columns.stage, columns.peer), routes.first, routes.receiver, route)
    sent, received = (np.full((len(routes), microbatches), -1, np.int32) for _ in range(2))
    _find_ends(columns.kind, columns.microbatch, route, sent, received)
    return MessageIndex(routes=routes, route=route, sent=sent, received=received)


@kernel
def _find_routes(columns: tuple[Codes, Ints, Ints], first: Ints, receiver: Ints, route: Ints) -> None:
    kind, stage, peer = columns
    stages = len(first) // 2
    for entry in range(len(kind)):
        code = kind[entry]
        sends, receives = code == SEND_F_ or code == SEND_B_, code == RECV_F_ or code == RECV_B_
        if not sends and not receives:
            continue
        a = stage[entry] if sends else peer[entry]
        b = peer[entry] if sends else stage[entry]
        route[entry] = NO_ROUTE
        if a < 0 or a >= stages:
            continue
        row = a if code == SEND_F_ or code == RECV_F_ else stages + a
        low, high = first[row], first[row + 1]
        while low < high:
            middle = (low + high) // 2
            if receiver[middle] < b:
                low = middle + 1
            else:
                high = middle
        if low < first[row + 1] and receiver[low] == b:
            route[entry] = low


@kernel
def _find_ends(kind: Codes, microbatch: Ints, route: Ints, sent: Ints, received: Ints) -> None:
    microbatches = sent.shape[1]
    for entry in range(len(kind)):
        if route[entry] < 0 or microbatch[entry] < 0 or microbatch[entry] >= microbatches:
            continue
        if kind[entry] == SEND_F_ or kind[entry] == SEND_B_:
            sent[route[entry], microbatch[entry]] = entry
        else:
            received[route[entry], microbatch[entry]] = entry


def on_other_ranks(placement: Sequence[int], stage: int, peers: Sequence[int]) -> list[int]:
    """Those of a stage's neighbours that are on another rank."""
    return [peer for peer in peers if placement[peer] != placement[stage]]
