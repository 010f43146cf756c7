"""When everything in rows with copies happens: a small simulation, for the search of places.

Ranks walk their rows; of all that can go on, the one that goes on earliest does. Copies of a rank follow each
other, out and back each on a lane of its own, and go through the rank's uplink, first come, first served.
Messages take a time per pair of stages and nothing else: what the simulator knows besides (links of messages
that are shared, receives that are posted late) does not decide where a copy is best placed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...ir.columns import AWAIT_, B_, F_, I_, OFFLOAD_, RELOAD_, Codes, Columns, Ints, Longs, starts_of
from ...ir.kernels import kernel
from ..language.shape import Shape
from .uplinks import Floats, Uplinks

NOT_YET = -1.0


class Neighbours(NamedTuple):
    """What F, and what B or I of a stage waits for: with n = stage for F and stages + stage for the others,
    `source[first[n] : first[n + 1]]`, whose results take `delay_s` to come."""

    first: Ints
    source: Ints
    delay_s: Floats


class Walk(NamedTuple):
    """Rows, and what they take.

    seconds: (stages, kinds).  uplink: (ranks,).  uplink_s: (stages,), seconds that a copy keeps its uplink.
    """

    kind: Codes
    stage: Ints
    microbatch: Ints
    offsets: Longs
    neighbours: Neighbours
    seconds: Floats
    uplink: Longs
    uplink_s: Floats


class CopyTimes(NamedTuple):
    """When what happens, in seconds. start, end: per entry.  made: (2, stages, micro-batches), the ends of
    forwards, and of B or I.  copied: the same of OFFLOAD and RELOAD.  free: (3, ranks), when a rank, its lane
    out and its lane back are free.  uplink_free: (2, uplinks).  ready: (ranks,).  position: (ranks,)."""

    start: Floats
    end: Floats
    made: Floats
    copied: Floats
    free: Floats
    uplink_free: Floats
    ready: Floats
    position: Longs


def walk_of(columns: Columns, shape: Shape, uplinks: Uplinks) -> Walk:
    """Rows of a shape, as `run` wants them."""
    flow, stages = shape.flow, len(shape.placement)
    rows = [*flow.reads_from, *flow.gradients_from]
    users = [*range(stages), *range(stages)]
    sources = np.array([s for row in rows for s in row], np.int32)
    delays = [shape.delay_s(s, user) for row, user in zip(rows, users, strict=True) for s in row]
    seconds = np.zeros((stages, len(columns.kinds)))
    for code, kind in enumerate(columns.kinds):
        seconds[:, code] = [shape.seconds(s, kind) for s in range(stages)]
    return Walk(
        columns.kind,
        columns.stage,
        columns.microbatch,
        columns.offsets,
        Neighbours(starts_of([len(row) for row in rows]), sources, np.array(delays, np.float64)),
        seconds,
        np.array(uplinks.of_rank, np.int64),
        np.array(uplinks.seconds, np.float64),
    )


def run(walk: Walk, microbatches: int) -> CopyTimes:
    """Walk all rows; they are taken to be complete and not to block."""
    entries, ranks, stages = len(walk.kind), len(walk.offsets) - 1, len(walk.uplink_s)
    moments = CopyTimes(
        start=np.zeros(entries),
        end=np.zeros(entries),
        made=np.full((2, stages, microbatches), NOT_YET),
        copied=np.full((2, stages, microbatches), NOT_YET),
        free=np.zeros((3, ranks)),
        uplink_free=np.zeros((2, int(walk.uplink.max()) + 1)),
        ready=np.full(ranks, NOT_YET),
        position=walk.offsets[:-1].astype(np.int64),
    )
    _run.form(4 * entries)(walk, moments)
    assert (moments.position == walk.offsets[1:]).all(), "rows that block"
    return moments


@kernel
def _run(w: Walk, m: CopyTimes) -> None:
    ranks = len(w.offsets) - 1
    while True:
        best = -1
        for rank in range(ranks):
            if m.position[rank] == w.offsets[rank + 1]:
                continue
            if m.ready[rank] < 0:
                m.ready[rank] = _ready_s(w, m, rank)
            if m.ready[rank] >= 0 and (best < 0 or m.ready[rank] < m.ready[best]):
                best = rank
        if best < 0:
            break
        _do(w, m, best)


@kernel
def _ready_s(w: Walk, m: CopyTimes, rank: int) -> float:
    """When a rank can begin its next entry; below 0 while that is not known."""
    at = m.position[rank]
    code, stage, number = w.kind[at], w.stage[at], w.microbatch[at]
    begin = m.free[0, rank]
    back = code == B_ or code == I_
    if code == F_ or back:
        phase = 1 if back else 0
        row = stage + phase * len(w.uplink_s)
        for n in range(w.neighbours.first[row], w.neighbours.first[row + 1]):
            made = m.made[phase, w.neighbours.source[n], number]
            if made < 0:
                return -1.0
            begin = max(begin, made + w.neighbours.delay_s[n])
        if back:
            begin = max(begin, m.copied[1, stage, number])
    return float(begin)


@kernel
def _do(w: Walk, m: CopyTimes, rank: int) -> None:
    """Do the next entry of a rank."""
    at = m.position[rank]
    code, stage, number = w.kind[at], w.stage[at], w.microbatch[at]
    begin = m.ready[rank]
    if code == OFFLOAD_ or code == RELOAD_:
        lane = 0 if code == OFFLOAD_ else 1
        uplink = w.uplink[rank]
        start = max(begin, m.free[1 + lane, rank], m.uplink_free[lane, uplink])
        if lane == 1:
            start = max(start, m.copied[0, stage, number])
        end = start + w.seconds[stage, code]
        m.uplink_free[lane, uplink] = start + w.uplink_s[stage]
        m.free[1 + lane, rank] = end
        m.copied[lane, stage, number] = end
        m.start[at], m.end[at] = start, end
    else:
        if code == AWAIT_:
            begin = max(begin, m.copied[0, stage, number])
        end = begin + w.seconds[stage, code]
        m.start[at], m.end[at] = begin, end
        m.free[0, rank] = end
        if code == F_:
            m.made[0, stage, number] = end
        elif code == B_ or code == I_:
            m.made[1, stage, number] = end
    m.ready[rank] = -1.0
    m.position[rank] = at + 1
