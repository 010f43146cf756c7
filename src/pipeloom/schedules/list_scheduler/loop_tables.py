"""What the inner loop of the list scheduler works on: tables that do not change, and the state that does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]
    Floats: TypeAlias = NDArray[np.float64]
    Bools: TypeAlias = NDArray[np.bool_]


class Tables(NamedTuple):
    """What does not change. Per stream, per rank, per place in a rank's order; see `task.Stream` and `Task`.

    order: micro-batches of each stream, those of stream i from `order_at[i]` on.  place: of an action in the
    order of its rank, or its key as a number; -1 if it has none.  line: stream of each place in that order,
    those of rank r from `line_at[r]` on; empty for keys.
    before, after: seconds of what a user inserted beside an action; empty if nothing is.
    unit: the other streams of the stream's unit, those of stream i from `unit_at[i]` on: on other ranks, in
    the same order of micro-batches. All of a unit begin together.
    route: of each of `feeds` the link that its message takes, or -1 on one rank.
    """

    size: int
    rank: Ints
    stage: Ints
    seconds: Floats
    memory: Floats
    urgent: Bools
    filler: Bools
    drains: Bools
    opens: Bools
    closes: Bools
    order_at: Ints
    order: Ints
    feeds_at: Ints
    feeds: Ints
    delay: Floats
    place: Ints
    line_at: Ints
    line: Ints
    own_at: Ints
    own: Ints
    limit: Floats
    open_rank: Floats
    open_stage: Floats
    before: Floats
    after: Floats
    unit_at: Ints
    unit: Ints
    row_at: Ints
    route: Ints
    strict: bool
    safe: bool
    level: bool
    early: int
    patience: float
    overlap: tuple[float, float]
    within: float


class SchedulerState(NamedTuple):
    """What changes. Per stream its next action: position, micro-batch, key, when it could start (`ready`) and
    what holds it back besides, and whether it fills gaps by now; per action what it still waits for and when
    the rest is there; per rank when it is free, how long it was idle between its actions (and last the most
    of all), what it holds, what fillers owe it, and how far it is; the rows, as in `Tables.row_at`; per link
    when it is free; `event` and `event_rank` are a heap of when which rank looks around, `events` says how
    many there are."""

    next: Ints
    batch: Ints
    key: Ints
    ready: Floats
    hold: Floats
    fills: Bools
    missing: Ints
    arrival: Floats
    free: Floats
    idle: Floats
    used: Floats
    owed: Floats
    peak: Floats
    left: Floats
    opened: Ints
    opened_stage: Ints
    unopened: Ints
    closed: Bools
    head: Ints
    done: Bools
    woken: Ints
    marked: Bools
    written: Ints
    row: Ints
    row_batch: Ints
    start: Floats
    link: Floats
    event: Floats
    event_rank: Ints
    events: Ints
