"""ProgramLayout: a program, its costs and its links as the arrays that the event loop reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from ..ir.action import KINDS, TRANSFERS, TREATMENTS, Action
from ..ir.cluster import Cluster
from ..ir.columns import (
    AWAIT_,
    B_,
    CODE,
    F_,
    I_,
    OFFLOAD_,
    RECOMPUTE_,
    RECV_B_,
    RECV_F_,
    REDUCE_,
    RELOAD_,
    SEND_B_,
    SEND_F_,
    STEP_,
    W_,
    Codes,
    Columns,
    Floats,
    Ints,
    Longs,
    starts_of,
)
from ..ir.costs import StageCost, action_seconds, pair_shares
from ..ir.dependencies import meets
from ..ir.errors import PlanError
from ..ir.flow import Flow, flow_of
from ..ir.kernels import kernel
from ..ir.message_index import EventCodes, MessageIndex, Routes
from ..ir.operation import ANCHORS, OPERATIONS, follows_anchor
from ..ir.schedule import Program
from ..ir.shared_weights import Reduction, reductions
from ..ir.stages import StageGraph
from .all_reduce import AllReduces, all_reduces_of
from .loop_state import COMPUTES, OTHER, RECEIVES, SENDS, ProgramLayout
from .shared_links import NO_SHARED_LINKS, copy_s, shared_links_of, transfer_s

STREAMS = ("compute", "send", "host", "d2h", "h2d")
"""Streams by their number in a layout."""

_NONE = np.zeros(0, np.int32)


def layout_of(
    program: Program,
    stages: StageGraph,
    costs: Sequence[StageCost],
    cluster: Cluster,
    *,
    receive_ahead: int,
    action_s: Mapping[Action, float],
) -> ProgramLayout:
    """Lay out a program that `check_program` accepts."""
    flow = flow_of(stages)
    columns, routes = program.columns, program.message_index(flow).routes
    size, durations = message_bytes(routes, stages), _durations(program, costs, cluster)

    def seconds(of: Callable[[int, int, int], float]) -> Floats:
        """By route: `of` its two ranks and its bytes."""
        each = zip(_ends(routes, program.placement), size.tolist(), strict=True)
        return np.array([of(a, b, amount) if a != b else 0.0 for (a, b), amount in each], np.float64)

    layout = timed_layout(
        program,
        flow,
        durations,
        seconds(partial(transfer_s, cluster)),
        receive_ahead=receive_ahead,
    )
    sums = all_reduces_of(_reductions(program, stages), costs, cluster, columns.ranks).repeated(
        len(program.updates)
    )
    arrivals, norm_behind = _norms(program, sums)
    of_channel = dict(zip(layout.channel.tolist(), _ends(routes, program.placement), strict=True))
    ends = [of_channel[channel] for channel in range(len(layout.target))]
    return layout._replace(
        occupied=seconds(lambda a, b, amount: cluster.link(a, b).occupied_s(amount)),
        entry_duration=_entry_durations(program, costs, action_s, durations),
        first_sum=sums.first,
        sums=sums.numbers,
        sum_arrivals=arrivals,
        norm_behind=norm_behind,
        sum_seconds=sums.seconds,
        shared=shared_links_of(program, costs, cluster, (ends, layout.message, size), sums.links(cluster)),
    )


def timed_layout(
    program: Program, flow: Flow, durations: Floats, route_s: Floats, *, receive_ahead: int = 2
) -> ProgramLayout:
    """A program whose actions and messages take the given times, by (stage, kind) and by route: each message
    has a link of its own, which keeps nobody, and nothing is summed."""
    columns, messages = program.columns, program.message_index(flow)
    channel, targets = _channels(messages.routes, program.placement)
    counts = np.zeros(len(targets) + 1, np.int64)
    np.add.at(counts, channel + 1, np.count_nonzero(messages.sent >= 0, axis=1))
    counts[0] = 0  # routes within a rank carry nothing
    first = np.cumsum(counts)
    if messages.event_codes is None:
        messages.event_codes = _event_codes(columns, messages, channel, first)
    codes = messages.event_codes
    first_meet, meeting = _meets(program, flow)
    begins = _step_begins(program)
    return ProgramLayout(
        kind=columns.kind,
        stage=columns.stage,
        offsets=columns.offsets,
        code=codes.code,
        in_order=codes.in_order,
        upto=codes.upto,
        message=codes.message,
        route=codes.route,
        channel=channel,
        seconds=route_s,
        channel_seconds=_channel_seconds(channel, route_s, len(targets)),
        occupied=np.zeros(len(channel)),
        first_message=first,
        target=np.array(targets, np.int64),
        duration=durations,
        flat_duration=durations.ravel(),
        entry_duration=np.zeros(0),
        stream=_streams(columns),
        blocks=_blocks(program),
        first_meet=first_meet,
        meets=meeting,
        microbatch=columns.microbatch,
        updates=len(program.updates),
        step_begins=begins,
        due=_due(columns, messages.route, channel, codes.message, first, begins),
        first_sum=np.zeros(columns.ranks * len(program.updates) + 1, np.int32),
        sums=np.zeros(0, np.int64),
        sum_arrivals=_NONE,
        norm_behind=np.zeros(0, np.int64),
        sum_seconds=np.zeros(0),
        receive_ahead=receive_ahead,
        shared=NO_SHARED_LINKS,
    )


def _reductions(program: Program, stages: StageGraph) -> Sequence[Sequence[Reduction]]:
    """For each rank what its REDUCEs sum: tied gradients, and the norm of all, which has hardly any bytes."""
    tied = reductions(stages, program.placement)
    if not program.clips:
        return tied
    ranks = tuple(range(program.columns.ranks))
    norm = Reduction(names=(), stages=tuple(range(len(program.placement))), ranks=ranks)
    return [(*(tied[rank] if rank < len(tied) else ()), norm) for rank in ranks]


def _norms(program: Program, sums: AllReduces) -> tuple[Ints, Longs]:
    """`ProgramLayout.sum_arrivals` and `norm_behind`. On each rank the norm is the last of its sums."""
    if not program.clips:
        return sums.ranks, np.zeros(0, np.int64)
    each = len(sums.ranks) // len(program.updates)
    norms = sums.numbers[sums.first[1] - 1] + each * np.arange(len(program.updates))
    arrivals, behind = sums.ranks.copy(), np.repeat(norms, each)
    arrivals[norms] += each - 1
    behind[norms] = -1
    return arrivals, behind


def message_bytes(routes: Routes, stages: StageGraph) -> Longs:
    """Size of a message on each route."""
    sizes = []
    for sender, receiver, back in zip(
        routes.sender.tolist(), routes.receiver.tolist(), routes.backward.tolist(), strict=True
    ):
        values = stages.gradients(receiver, sender) if back else stages.between[sender, receiver]
        sizes.append(sum(value.bytes for value in values))
    return np.array(sizes, np.int64)


def _ends(routes: Routes, placement: Sequence[int]) -> list[tuple[int, int]]:
    """The ranks at both ends of each route."""
    both = zip(routes.sender.tolist(), routes.receiver.tolist(), strict=True)
    return [(placement[a], placement[b]) for a, b in both]


def _channels(routes: Routes, placement: Sequence[int]) -> tuple[Longs, list[int]]:
    """The channel of each route, -1 within a rank; and the rank to which each channel leads."""
    ends = _ends(routes, placement)
    known = {pair: at for at, pair in enumerate(sorted({pair for pair in ends if pair[0] != pair[1]}))}
    return np.array([known.get(pair, -1) for pair in ends], np.int64), [target for _, target in known]


def _event_codes(columns: Columns, messages: MessageIndex, channel: Longs, first: Longs) -> EventCodes:
    """first: the first message of each channel, and their number."""
    message, code = np.full(len(columns), -1, np.int32), np.full(len(columns), OTHER, np.int32)
    route_of = np.empty(first[-1], np.int32)
    of_entry = (columns.kind, columns.stage, columns.microbatch, messages.route)
    following = np.stack([first, first])
    if _encode(of_entry, len(columns.kinds), messages.sent, channel, following, (message, code, route_of)):
        return EventCodes(message, route_of, code, True, np.zeros(0, np.int64))
    receives = np.flatnonzero((columns.kind == RECV_F_) | (columns.kind == RECV_B_))
    receives = receives[np.argsort(channel[messages.route[receives]], kind="stable")]
    # Messages of a later channel have higher numbers, so that one running maximum serves all channels.
    known = np.maximum.accumulate(message[receives], dtype=np.int64) + 1
    return EventCodes(message, route_of, code, False, known - first[channel[messages.route[receives]]])


@kernel
def _encode(
    of_entry: tuple[Codes, Ints, Ints, Ints],
    kinds: int,
    sent: Ints,
    channel: Longs,
    following: Longs,
    made: tuple[Ints, Ints, Ints],
) -> bool:
    """Fill in the message and the code of each entry, and the route of each message. Returns whether each
    channel's messages are received in the order sent.

    following: (2, channels), the next message of each to be sent, and to be received.
    """
    kind, stage, microbatch, route = of_entry
    message, code, route_of = made
    for entry in range(len(kind)):
        what = kind[entry]
        if what == SEND_F_ or what == SEND_B_:
            at = channel[route[entry]]
            message[entry] = following[0, at]
            route_of[following[0, at]] = route[entry]
            following[0, at] += 1
            code[entry] = 4 * route[entry] + SENDS
        elif what == RECV_F_ or what == RECV_B_:
            code[entry] = 4 * route[entry] + RECEIVES
        elif what != REDUCE_ and what != STEP_:
            code[entry] = 4 * (stage[entry] * kinds + what) + COMPUTES
    in_order = True
    for entry in range(len(kind)):
        if kind[entry] == RECV_F_ or kind[entry] == RECV_B_:
            message[entry] = message[sent[route[entry], microbatch[entry]]]
            at = channel[route[entry]]
            in_order = in_order and message[entry] == following[1, at]
            following[1, at] += 1
    return in_order


def _channel_seconds(channel: Longs, seconds: Floats, channels: int) -> Floats:
    """By channel the time of a message, or -1 where its routes differ."""
    times_of: list[set[float]] = [set() for _ in range(channels)]
    for at, time in zip(channel.tolist(), seconds.tolist(), strict=True):
        if at >= 0:
            times_of[at].add(time)
    return np.array([min(times) if len(times) == 1 else -1.0 for times in times_of], np.float64)


def _durations(program: Program, costs: Sequence[StageCost], cluster: Cluster) -> Floats:
    """By (stage, kind)."""
    columns = program.columns
    table = np.zeros((len(costs), len(columns.kinds)))
    for code, kind in enumerate(columns.kinds):
        if kind not in TRANSFERS:
            table[:, code] = [action_seconds(costs, Action(s, kind, 0)) for s in range(len(costs))]
    if columns.treats_residuals:
        table[:, [OFFLOAD_, RELOAD_]] = [
            copy_s(cost, cluster, rank) for cost, rank in zip(costs, program.placement, strict=True)
        ]
    return table


def _entry_durations(
    program: Program, costs: Sequence[StageCost], action_s: Mapping[Action, float], durations: Floats
) -> Floats:
    """Per entry, where pairs share their time or actions have times of their own; else empty."""
    if not program.pairs and not action_s:
        return np.zeros(0)
    columns = program.columns
    own: Floats = durations[columns.stage, columns.kind]
    for action, seconds in {**pair_shares(costs, program.pairs), **action_s}.items():
        if not 0 <= seconds < float("inf"):
            raise PlanError(f"{action} is to take {seconds} s", hint="give finite times from 0 on")
        own[_entry(program, action)] = seconds
    return own


def _entry(program: Program, action: Action) -> int:
    """Where the program has an action that takes time by itself. Raises: PlanError if nowhere."""
    kinds, (stages, microbatches) = program.columns.kinds, (len(program.placement), program.microbatches)
    known = action.kind in kinds and 0 <= action.stage < stages and 0 <= action.microbatch < microbatches
    if known and KINDS[action.kind].on_microbatch:
        entry = int(program.action_index.of(kinds.index(action.kind))[action.stage, action.microbatch])
        if entry >= 0:
            return entry
    raise PlanError(
        f"{action} is given a time of its own, but is no action of the program that takes one",
        hint="name compute actions, operations, OFFLOAD, RELOAD or RECOMPUTE of the program",
    )


def _streams(columns: Columns) -> Ints:
    """By kind; 0 for transfers and sums, of which the loop knows by itself, and for copies that the program
    does not have."""
    absent = () if columns.treats_residuals else TREATMENTS
    numbers = np.zeros(len(columns.kinds), np.int32)
    for code, kind in enumerate(columns.kinds):
        if KINDS[kind].on_microbatch and kind not in absent:
            numbers[code] = STREAMS.index(KINDS[kind].stream)
    return numbers


def _step_begins(program: Program) -> Longs:
    """Per entry the number of the step that a rank begins there, from 1, and 0 for none; empty for a program
    of one update. A rank runs one of several as the rows of `lowering.steady`: each is cut in front of the
    first forward of its batch, and what the drain runs in front of its first action.

        0F0 0F1 0F2 | 0F3 0B0 0STEP0 0F4 0B1 ... | 0B9 0B10 0STEP9
    """
    if program.every is None:
        return np.zeros(0, np.int64)
    columns = program.columns
    begins = np.zeros(len(columns) + 1, np.int64)
    behind = [code for code, kind in enumerate(columns.kinds) if follows_anchor(kind)]
    belongs_before = columns.among((SEND_F_, SEND_B_, REDUCE_, STEP_, OFFLOAD_, AWAIT_, *behind))
    for low, high in pairwise(columns.offsets.tolist()):
        row = low + np.flatnonzero(columns.among((F_, B_, I_, W_))[low:high])
        if not len(row):
            continue
        step = np.where(columns.kind[row] == F_, columns.microbatch[row] // program.every, 0)
        # Each batch has as many actions as any other, and the last row is as long as those before it.
        starts = [0, *(np.flatnonzero(np.diff(np.maximum.accumulate(step))) + 1).tolist()]
        starts.append(starts[-1] + len(row) // len(program.updates))
        for number, first in enumerate(starts[1:]):
            at = int(row[first - 1]) + 1
            while at < high and belongs_before[at]:
                at += 1
            begins[at] = number + 1
        begins[high] = 0
    return begins[:-1]


def _due(columns: Columns, route: Ints, channel: Longs, message: Ints, first: Longs, begins: Longs) -> Longs:
    """See `ProgramLayout.due`."""
    if not len(begins):
        return np.diff(first)[:, None]
    due = np.zeros((len(first) - 1, int(begins.max(initial=0)) + 1), np.int64)
    for low, high in pairwise(columns.offsets.tolist()):
        kind, step = columns.kind[low:high], np.maximum.accumulate(begins[low:high])
        receives = np.flatnonzero((kind == RECV_F_) | (kind == RECV_B_))
        of = channel[route[low + receives]]
        np.maximum.at(due, (of, step[receives]), message[low + receives] - first[of] + 1)
    return np.maximum.accumulate(due, axis=1)


def _blocks(program: Program) -> Ints:
    """Per entry the one that waits for it: the anchor of an operation, the AWAIT or else the RELOAD that
    follows an OFFLOAD, and the RECOMPUTE, B or I that follows a RELOAD. Empty where there is neither."""
    columns, index = program.columns, program.action_index
    before = [c for c, k in enumerate(columns.kinds) if k in OPERATIONS and OPERATIONS[k].before is not None]
    if not before and not columns.treats_residuals:
        return _NONE
    blocks = np.full(len(columns), -1, np.int32)
    if columns.treats_residuals:
        back, again = index.of(RELOAD_), index.of(RECOMPUTE_)
        user = np.where(again >= 0, again, index.gradients())
        awaits = index.of(AWAIT_)
        for table, waiting in ((index.of(OFFLOAD_), np.where(awaits >= 0, awaits, back)), (back, user)):
            has = table >= 0
            blocks[table[has]] = waiting[has]
    for code in before:
        operation = OPERATIONS[columns.kinds[code]]
        table = index.of(code)
        for kind in reversed(ANCHORS[operation.anchor]):
            anchor = index.of(CODE[kind])
            both = (table >= 0) & (anchor >= 0)
            blocks[table[both]] = anchor[both]
    return blocks


def _meets(program: Program, flow: Flow) -> tuple[Ints, Ints]:
    """Entries that begin together with each entry; empty where there are none."""
    columns, index = program.columns, program.action_index
    stages = range(len(program.placement))
    each = [(code, stage, kind) for code, kind in enumerate(columns.kinds) for stage in stages]
    groups = [(code, stage, others) for code, stage, kind in each if (others := meets(stage, kind, flow))]
    if not groups:
        return _NONE, _NONE
    # Two passes make ragged rows without a list per entry: count what each entry meets, and remember for each
    # meeting its place in the entry's row; then the counts give where rows begin.
    counts = np.zeros(len(columns), np.int32)
    meetings = []
    for code, stage, others in groups:
        table = index.of(code)
        for other in others:
            if 0 <= other < len(table):
                both = (table[stage] >= 0) & (table[other] >= 0)
                mine = table[stage][both]
                meetings.append((mine, counts[mine], table[other][both]))
                counts[mine] += 1
    first = starts_of(counts)
    together = np.empty(first[-1], np.int32)
    for mine, at, theirs in meetings:
        together[first[mine] + at] = theirs
    return first, together
