"""The simulator: lays a program out, runs the event loop, and makes a timeline of its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..checks.schedules import check_program
from ..ir.action import KINDS, Action
from ..ir.cluster import Cluster
from ..ir.columns import REDUCE_, STEP_, Floats
from ..ir.costs import StageCost
from ..ir.errors import PlanError
from ..ir.flow import flow_of
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..ir.timeline import Curves, Timeline
from .event_loop import run, run_sharing
from .layout import layout_of, timed_layout
from .loop_state import ProgramLayout, new_state
from .memory import Memory, memory_of, with_held_sends
from .shared_links import with_uplinks
from .timeline_events import SimulatedEvents


def simulate(
    program: Program,
    stages: StageGraph,
    costs: tuple[StageCost, ...],
    cluster: Cluster,
    *,
    receive_ahead: int = 2,
    action_s: Mapping[Action, float] | None = None,
    caps: Sequence[int] = (),
    small_bytes: int | None = None,
) -> Timeline:
    """Predict one step.

    program: as `lower` makes it, or one that `check_program` accepts.
    costs: for each stage, on the device of its rank (see `StageCost.slowed`).
    receive_ahead: receives that a rank keeps posted for each rank that sends to it, each with a buffer; of
        several steps those of the step that it has begun.
    action_s: seconds of single actions of the program, instead of what their stage's costs say.
    caps: bytes that each rank keeps, if it can, by waiting for its messages, see `small_bytes`; or none.
    small_bytes: how long senders hold messages: those up to this size until the end of the step, and others
        until the action ends during which they got through, as the runtime does while that keeps the cap.
        Unless given, all of them until they are through.

    A message occupies its sender and its receiver for `Link.occupied_s`. It moves when it is sent, its
    receive is posted and the link of that pair of ranks is free, and takes `Link.transfer_s`. Events: compute
    actions, RECOMPUTE and STEP on stream "compute"; each message on "send" of its sender; time that a rank
    waits for one and receives it, where there is any, and REDUCE with its waits on "recv"; OFFLOAD on "d2h"
    and RELOAD on "h2d", beside computing and each other, one at a time on each. An OFFLOAD begins when its
    rank comes to it, a RELOAD when that is so and its OFFLOAD has ended; AWAIT waits for its OFFLOAD,
    RECOMPUTE, B and I for their RELOAD, and STEP for all that runs beside computing.

    Raises: PlanError if an argument does not fit the program; DeadlockError if the program blocks.

    >>> from pipeloom.ir.cluster import Device, Link
    >>> from pipeloom.ir.costs import equal_costs
    >>> from pipeloom.ir.schedule import parse_program
    >>> from pipeloom.ir.stages import chain
    >>> rows = ("0F0 0SEND_F0>1 0RECV_B0<1 0B0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0")
    >>> program = parse_program(1, (0, 1), rows)
    >>> device = Device(name="any", memory_bytes=1)
    >>> link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.5)  # 4 bytes take 0.5 s
    >>> cluster = Cluster(devices=(device, device), within_node=link)
    >>> round(simulate(program, chain(2), equal_costs(2), cluster).step_s, 6)
    7.0
    """
    _refuse_mismatch(program, stages, costs, cluster)
    _refuse_caps(caps, program.columns.ranks)
    layout = layout_of(program, stages, costs, cluster, receive_ahead=receive_ahead, action_s=action_s or {})
    memory = _run(program, stages, costs, layout)
    if small_bytes is not None:
        memory = with_held_sends(memory, small_bytes, caps)
    state = memory.state
    peaks = memory.peaks()
    host_curve = memory.host_curve if program.columns.treats_residuals else None
    return Timeline(
        source="predicted",
        ranks=program.columns.ranks,
        peaks=peaks,
        residual_peaks=memory.residual_peaks(),
        pairs=tuple((str(first), str(second)) for first, second in program.pairs),
        events=SimulatedEvents(
            program.columns,
            [KINDS[kind].stream for kind in program.columns.kinds],
            (state.start, state.end),
            layout.message,
            (state.transfer_start, state.transfer_end),
        ),
        memory=Curves([sum(peak.values()) for peak in peaks], memory.curve, host_curve),
        steps=len(program.updates),
        steady_s=None if program.every is None else _steady_s(program, state.end),
    )


def _steady_s(program: Program, end: Floats) -> float:
    """Seconds from one update to the next in the middle of several, on the slowest rank."""
    columns, count = program.columns, len(program.updates)
    steps = np.flatnonzero(columns.kind == STEP_)
    late = count // 2
    rank = np.searchsorted(columns.offsets, steps, side="right")
    ends = np.zeros((2, columns.ranks + 1))
    for row, update in enumerate((late, late - 1)):
        of_update = columns.microbatch[steps] == update
        np.maximum.at(ends[row], rank[of_update], end[steps[of_update]])
    return float((ends[0] - ends[1]).max())


def _run(program: Program, stages: StageGraph, costs: Sequence[StageCost], layout: ProgramLayout) -> Memory:
    state = new_state(layout, program.columns.ranks, starts=_needs_starts(program, layout))
    (run_sharing if layout.shared.link_count else run)(layout, state)
    if not (state.position == layout.offsets[1:]).all():
        check_program(program, stages)
        raise AssertionError("the simulator is stuck on a program that the checks let pass")
    return memory_of(program, stages, costs, layout, state)


def time_actions(
    program: Program,
    stages: StageGraph,
    action_s: Floats,
    message_s: Callable[[int, int], float],
    *,
    uplinks: Sequence[int | None] = (),
    copy_link_s: Sequence[float] = (),
) -> tuple[Floats, Floats]:
    """When the entries of a program begin and end, in seconds, and nothing else: for a search of orders.

    program: with its messages, of which it is known that it can run.  action_s: by stage and kind, as in its
    columns.  message_s: (from stage, to stage) -> seconds of a message between ranks.
    uplinks, copy_link_s: see `with_uplinks`; none where each rank has an uplink of its own.
    """
    flow = flow_of(stages)
    routes = program.message_index(flow).routes
    ends = zip(routes.sender.tolist(), routes.receiver.tolist(), strict=True)
    layout = timed_layout(program, flow, action_s, np.array([message_s(a, b) for a, b in ends], np.float64))
    if len(uplinks):
        layout = layout._replace(shared=with_uplinks(layout.shared, program, uplinks, copy_link_s))
    state = new_state(layout, program.columns.ranks)
    (run_sharing if layout.shared.link_count else run)(layout, state)
    assert (state.position == layout.offsets[1:]).all(), "a program that cannot run"
    return state.start, state.end


def _needs_starts(program: Program, layout: ProgramLayout) -> bool:
    """Whether anything may start later than what is before it in its row ends."""
    awaits = program.every is not None and REDUCE_ in program.columns.kind
    return awaits or bool(len(layout.blocks) or len(layout.first_meet) or layout.stream.any())


def _refuse_caps(caps: Sequence[int], ranks: int) -> None:
    if len(caps) not in (0, ranks):
        raise PlanError(f"{len(caps)} caps for {ranks} ranks", hint="give one per rank, or none at all")


def _refuse_mismatch(
    program: Program, stages: StageGraph, costs: tuple[StageCost, ...], cluster: Cluster
) -> None:
    if not len(costs) == len(stages.stages) == len(program.placement):
        raise PlanError(
            f"{len(costs)} stage costs and {len(stages.stages)} stages for a program of "
            f"{len(program.placement)} stages",
            hint="give one StageCost per stage",
        )
    if len(cluster.devices) < len(program.rows):
        raise PlanError(
            f"the program has {len(program.rows)} ranks, the cluster {len(cluster.devices)} devices",
            hint="add devices, or use fewer ranks",
        )
