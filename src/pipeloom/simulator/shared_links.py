"""Sharing: which messages and copies go through links that several ranks share.

A message between two nodes goes out through the network link of one and in through that of the other
(`Cluster.node_link`), at the same time; a copy between a device and the host goes through the uplink of its
switch. Each takes a shared link for its bytes at the link's rate, and as long as the slowest of its links in
all. What waits for one of its two links keeps its place at the other; what carries no bytes takes its turn
too.

Who gets a link depends on who asks first, on whatever rank. A channel requests the two links of its next
message, a lane of a rank the link of its next copy, and a sum over ranks all of its links, from when it could
move or begin. Only when every rank waits or has ended is the earliest request served: all that is requested
later follows from it, so it cannot be for an earlier time.

That holds as a source has one request in the heap at a time, and its next one is for the end of this one, or
later; and as ranks that wait go on no earlier than what they wait for.

    rank 0   F  SEND ---.                              link out of node 0
    rank 1   F  F  SEND -+-> heap of (time, entry) -->  |0's message|1's message|
                          served by time, then entry
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..ir.cluster import Cluster
from ..ir.columns import (
    AWAIT_,
    OFFLOAD_,
    RECOMPUTE_,
    RELOAD_,
    SEND_B_,
    SEND_F_,
    Columns,
    Ints,
    Longs,
    starts_of,
)
from ..ir.costs import StageCost
from ..ir.heap import pop, push
from ..ir.kernels import kernel
from ..ir.schedule import Program
from .loop_state import (
    COPY_IN,
    COPY_LANES,
    COPY_OUT,
    MOVED,
    POSTED,
    SENT,
    ProgramLayout,
    SharedLinks,
    SimulatorState,
    sums_end,
    wake,
    wake_all_reduce,
)

_NO_INTS, _NO_FLOATS = np.zeros(0, np.int32), np.zeros(0)
NO_SHARED_LINKS = SharedLinks(
    channel_links=np.zeros((0, 2), np.int32),
    message_link_s=_NO_FLOATS,
    sender=_NO_INTS,
    home=_NO_INTS,
    copy_link=np.zeros((0, COPY_LANES), np.int32),
    copy_link_s=np.zeros((0, COPY_LANES)),
    first_copy=np.zeros((0, COPY_LANES), np.int32),
    next_copy=_NO_INTS,
    needs=_NO_INTS,
    first_sum_link=_NO_INTS,
    sum_links=_NO_INTS,
    sum_link_s=_NO_FLOATS,
    link_count=0,
)


def shared_links_of(
    program: Program,
    costs: Sequence[StageCost],
    cluster: Cluster,
    messages: tuple[Sequence[tuple[int, int]], Ints, Longs],
    sums: Sequence[Mapping[tuple[str, int], float]],
) -> SharedLinks:
    """What is shared; `NO_SHARED_LINKS` where nothing is, and then the event loop does nothing for it.

    messages: the ranks at both ends of each channel; the message of each entry; bytes of a message, by route.
    sums: by sum over ranks, what it takes of the links of nodes, in seconds (see `link_seconds`).
    """
    shared = NO_SHARED_LINKS
    ends, message, size = messages
    gates = _channel_links(cluster, ends)
    if cluster.node_link is not None and ((gates >= 0).any() or any(sums)):
        rate = cluster.node_link.bandwidth_bytes_per_s
        sender = _senders(program.columns, message)
        nodes = {node: at for at, node in enumerate(sorted({device.node for device in cluster.devices}))}
        sum_links = [
            (2 * nodes[node] + (way == "into"), s) for seconds in sums for (way, node), s in seconds.items()
        ]
        shared = shared._replace(
            channel_links=gates,
            message_link_s=size / rate,
            sender=sender,
            link_count=2 * len(nodes),
            first_sum_link=starts_of([len(seconds) for seconds in sums]),
            sum_links=np.array([gate for gate, _ in sum_links], np.int32),
            sum_link_s=np.array([seconds for _, seconds in sum_links], np.float64),
        )
    switches = [cluster.devices[rank].switch for rank in range(program.columns.ranks)]
    if program.columns.treats_residuals and any(device.switch for device in cluster.devices):
        numbers = {name: at for at, name in enumerate(sorted(cluster.switches))}
        uplinks = [None if switch is None else numbers[switch] for switch in switches]
        copy_link_s = [
            0.0
            if (switch := switches[rank]) is None
            else cost.offloaded_bytes / cluster.switches[switch].bandwidth_bytes_per_s
            for cost, rank in zip(costs, program.placement, strict=True)
        ]
        shared = with_uplinks(shared, program, uplinks, copy_link_s)
    return shared


def crosses(cluster: Cluster, a: int, b: int) -> bool:
    """Whether messages between two ranks go through the network links of their nodes."""
    one, other = cluster.devices[a], cluster.devices[b]
    same_group = one.group is not None and one.group == other.group
    return cluster.node_link is not None and one.node != other.node and not same_group


def transfer_s(cluster: Cluster, a: int, b: int, size: int) -> float:
    """Seconds of a message from rank a to rank b if nothing else is on its way.

    >>> from ..ir.cluster import Device, Link
    >>> far, slow = Link(bandwidth_bytes_per_s=4.0), Link(bandwidth_bytes_per_s=1.0)
    >>> two = tuple(Device(name="any", memory_bytes=1, node=node) for node in (0, 1))
    >>> transfer_s(Cluster(devices=two, within_node=far, node_link=slow), 0, 1, 8)
    8.0
    """
    own = cluster.link(a, b).transfer_s(size)
    if cluster.node_link is None or not crosses(cluster, a, b):
        return own
    return max(own, cluster.node_link.transfer_s(size))


def copy_s(cost: StageCost, cluster: Cluster, rank: int) -> tuple[float, float]:
    """Seconds of OFFLOAD and of RELOAD of a stage on a rank if nothing else is copied."""
    switch = cluster.devices[rank].switch
    if switch is None or not cost.offloaded_bytes:
        return cost.offload_s, cost.reload_s
    least = cluster.switches[switch].transfer_s(cost.offloaded_bytes)
    return max(cost.offload_s, least), max(cost.reload_s, least)


def _channel_links(cluster: Cluster, ends: Sequence[tuple[int, int]]) -> Ints:
    """Per channel: twice the node that it leaves, and twice the node that it enters plus 1."""
    nodes = {node: at for at, node in enumerate(sorted({device.node for device in cluster.devices}))}
    place = [nodes[device.node] for device in cluster.devices]
    rows = [(2 * place[a], 2 * place[b] + 1) if crosses(cluster, a, b) else (-1, -1) for a, b in ends]
    return np.array(rows, np.int32).reshape(-1, 2)


def _senders(columns: Columns, message: Ints) -> Ints:
    sends = np.flatnonzero((columns.kind == SEND_F_) | (columns.kind == SEND_B_))
    sender = np.zeros(len(sends), np.int32)
    sender[message[sends]] = sends
    return sender


def with_uplinks(
    links: SharedLinks, program: Program, uplinks: Sequence[int | None], copy_link_s: Sequence[float]
) -> SharedLinks:
    """The same with uplinks to the host. uplinks: of each rank its number, None for one of its own.
    copy_link_s: of each stage the seconds that a copy takes of its uplink."""
    columns, index = program.columns, program.action_index
    lanes = np.full((columns.ranks, COPY_LANES), -1, np.int32)
    first_copy = lanes.copy()
    next_copy, needs = (np.full(len(columns), -1, np.int32) for _ in range(2))
    for rank, number in enumerate(uplinks):
        if number is None:
            continue
        low, high = columns.offsets[rank : rank + 2].tolist()
        for lane, code in ((COPY_OUT, OFFLOAD_), (COPY_IN, RELOAD_)):
            lanes[rank, lane] = links.link_count + COPY_LANES * number + lane
            row = low + np.flatnonzero(columns.kind[low:high] == code)
            first_copy[rank, lane] = row[0] if len(row) else -1
            next_copy[row[:-1]] = row[1:]
    away, back, again = (index.of(code) for code in (OFFLOAD_, RELOAD_, RECOMPUTE_))
    user = np.where(again >= 0, again, index.gradients())
    shared = np.array([uplinks[rank] is not None for rank in program.placement])[:, None]
    for table, waiting in ((away, index.of(AWAIT_)), (away, back), (back, user)):
        both = (table >= 0) & (waiting >= 0) & shared
        needs[waiting[both]] = table[both]
    count = 1 + max((number for number in uplinks if number is not None), default=-1)
    return links._replace(
        home=np.array(program.placement, np.int32),
        copy_link=lanes,
        copy_link_s=np.repeat(np.array(copy_link_s, np.float64)[:, None], COPY_LANES, axis=1),
        first_copy=first_copy,
        next_copy=next_copy,
        needs=needs,
        link_count=links.link_count + COPY_LANES * count,
    )


@kernel
def request(s: SimulatorState, time: float, entry: int) -> None:
    push(s.requests.time, s.requests.entry, s.requests.size, time, entry)


@kernel
def mark_pending(s: SimulatorState, number: int) -> None:
    """Remember a channel, or behind all channels a lane of a rank: something has come to it."""
    if not s.requests.is_pending[number]:
        s.requests.is_pending[number] = True
        s.requests.pending[s.requests.size[1]] = number
        s.requests.size[1] += 1


@kernel
def issue_copy(p: ProgramLayout, s: SimulatorState, rank: int, entry: int, clock: float) -> bool:
    """Note that a rank has come to a copy; false if its link is its own."""
    lane = COPY_IN if p.kind[entry] == RELOAD_ else COPY_OUT
    if not len(p.shared.copy_link) or p.shared.copy_link[rank, lane] < 0:
        return False
    s.requests.issued[entry] = clock
    mark_pending(s, len(p.target) + COPY_LANES * rank + lane)
    return True


@kernel
def copy_known(p: ProgramLayout, s: SimulatorState, rank: int, entry: int) -> bool:
    """Whether the copy that an action waits for has its times."""
    needed = p.shared.needs[entry]
    if needed < 0 or s.requests.copied[needed]:
        return True
    s.requests.awaited[rank] = needed
    return False


@kernel
def all_copies_known(s: SimulatorState, rank: int) -> bool:
    if s.requests.head[rank, COPY_OUT] < 0 and s.requests.head[rank, COPY_IN] < 0:
        return True
    s.requests.awaited[rank] = -2
    return False


@kernel
def request_links(p: ProgramLayout, s: SimulatorState) -> None:
    """Let what has come to channels and lanes ask for links, as far as it could move or begin."""
    channels = len(p.target)
    while s.requests.size[1]:
        s.requests.size[1] -= 1
        number = s.requests.pending[s.requests.size[1]]
        s.requests.is_pending[number] = False
        if s.requests.requested[number]:
            continue  # its next one is looked at when this one has been served, which marks it again
        time, entry = 0.0, -1
        if number < channels:
            moved = s.counts[number, MOVED]
            if moved < min(s.counts[number, SENT], s.counts[number, POSTED]):
                message = p.first_message[number] + moved
                time = max(s.transfer_start[message], s.transfer_end[message], s.channel_free[number])
                entry = p.shared.sender[message]
        else:
            rank, lane = divmod(number - channels, COPY_LANES)
            head = s.requests.head[rank, lane]
            if head >= 0 and s.requests.issued[head] >= 0:
                needed = p.shared.needs[head]
                if needed < 0 or s.requests.copied[needed]:
                    free = s.stream_free[rank, p.stream[p.kind[head]]]
                    time = max(s.requests.issued[head], free, s.start[head])
                    entry = head
        if entry >= 0:
            s.requests.requested[number] = True
            request(s, time, entry)


@kernel
def serve_earliest(p: ProgramLayout, s: SimulatorState) -> None:
    """Give the earliest request its links, as soon as they are free."""
    time, entry = s.requests.time[0], s.requests.entry[0]
    pop(s.requests.time, s.requests.entry, s.requests.size)
    if entry >= len(p.kind):  # numbers behind all entries are those of sums
        _serve_sum(p, s, entry - len(p.kind), time)
        return
    code = p.kind[entry]
    if code == SEND_F_ or code == SEND_B_:
        message = p.message[entry]
        route = p.route[message]
        channel = p.channel[route]
        leaves, enters = p.shared.channel_links[channel, 0], p.shared.channel_links[channel, 1]
        begin = max(time, s.requests.link_free[leaves], s.requests.link_free[enters])
        s.requests.link_free[leaves] = s.requests.link_free[enters] = begin + p.shared.message_link_s[route]
        s.transfer_start[message], s.transfer_end[message] = begin, begin + p.seconds[route]
        s.channel_free[channel] = s.transfer_end[message]
        s.counts[channel, MOVED] += 1
        target = p.target[channel]
        if s.awaited[target] == message:
            s.awaited[target] = -1
            wake(s, target)
        s.requests.requested[channel] = False
        mark_pending(s, channel)
    else:
        _serve_copy(p, s, entry, time)


@kernel
def _serve_sum(p: ProgramLayout, s: SimulatorState, number: int, time: float) -> None:
    """Begin a sum as soon as all links that it goes through are free."""
    low, high = p.shared.first_sum_link[number], p.shared.first_sum_link[number + 1]
    begin = time
    for at in range(low, high):
        begin = max(begin, s.requests.link_free[p.shared.sum_links[at]])
    for at in range(low, high):
        s.requests.link_free[p.shared.sum_links[at]] = begin + p.shared.sum_link_s[at]
    s.sum_start[number] = begin
    s.sum_arrived[number] += 1
    wake_all_reduce(s, number)
    all_have_come(p, s, _norm_to_begin(p, s, number))


@kernel
def all_have_come(p: ProgramLayout, s: SimulatorState, number: int) -> None:
    """Begin a sum, or ask for the shared links that it goes through; then the norm that waits for it."""
    while number >= 0:
        if len(p.norm_behind) and p.norm_behind[number] < 0:
            _norm_begins(p, s, number)
        if sum_uses_shared_links(p, number):
            request(s, s.sum_start[number], len(p.kind) + number)
            return
        wake_all_reduce(s, number)
        number = _norm_to_begin(p, s, number)


@kernel
def _norm_to_begin(p: ProgramLayout, s: SimulatorState, number: int) -> int:
    """The norm that waited for nothing but this sum to begin, -1 for none."""
    norm = p.norm_behind[number] if len(p.norm_behind) else -1
    if norm < 0:
        return -1
    s.sum_arrived[norm] += 1
    return int(norm) if s.sum_arrived[norm] == p.sum_arrivals[norm] else -1


@kernel
def _norm_begins(p: ProgramLayout, s: SimulatorState, norm: int) -> None:
    """Not before every rank has its other sums of the same update, as these are what the norm is of."""
    update = norm * p.updates // len(p.sum_arrivals)
    for rank in range(len(s.clock)):
        row = rank * p.updates + update
        s.sum_start[norm] = max(s.sum_start[norm], sums_end(p, s, p.first_sum[row], p.first_sum[row + 1] - 1))


@kernel
def sum_uses_shared_links(p: ProgramLayout, number: int) -> bool:
    """Whether a sum goes through links that are shared, and so waits for these too."""
    gates = p.shared.first_sum_link
    return bool(len(gates) and gates[number] < gates[number + 1])


@kernel
def _serve_copy(p: ProgramLayout, s: SimulatorState, entry: int, time: float) -> None:
    """Copy residuals as soon as the link is free, from when it was asked for."""
    code, stage = p.kind[entry], p.stage[entry]
    rank = p.shared.home[stage]
    lane = COPY_IN if code == RELOAD_ else COPY_OUT
    link = p.shared.copy_link[rank, lane]
    begin = max(time, s.requests.link_free[link])
    s.requests.link_free[link] = begin + p.shared.copy_link_s[stage, lane]
    end = begin + (p.entry_duration[entry] if len(p.entry_duration) else p.duration[stage, code])
    s.start[entry], s.end[entry] = begin, end
    s.stream_free[rank, p.stream[code]] = end
    s.requests.copied[entry] = True
    if p.blocks[entry] >= 0:
        s.start[p.blocks[entry]] = max(s.start[p.blocks[entry]], end)
    s.requests.head[rank, lane] = p.shared.next_copy[entry]
    number = len(p.target) + COPY_LANES * rank
    s.requests.requested[number + lane] = False
    for other in range(COPY_LANES):  # a RELOAD may have waited for this OFFLOAD
        mark_pending(s, number + other)
    if s.requests.awaited[rank] == entry or s.requests.awaited[rank] == -2:
        s.requests.awaited[rank] = -1
        wake(s, rank)
