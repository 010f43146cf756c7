"""Explain: why ranks were idle, and what the step's length came from, for predicted and measured steps alike.

A wait is followed back: what it waited for was itself computed by a rank that had been waiting, and so on,
until a rank is found that was busy (the root), or the beginning of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...ir.cluster import Cluster
from ...ir.explanation import Explanation, Idle, Reason
from ...ir.schedule import Program
from ...ir.stages import StageGraph
from ...ir.timeline import Timeline
from .wait_causes import Causes, TimedSpan, closes_update

MORE = 1e-9
"""A rank has more work than another if it has more by this share."""


def explain_idle_time(
    program: Program, timeline: Timeline, stages: StageGraph, cluster: Cluster | None = None
) -> Explanation:
    """Give each moment in which a rank computes nothing a reason, and find the critical path.

    program: what ran, possibly several times over.  timeline: one step of it, predicted or measured.
    cluster: what it ran on: without it waiting for a link that several ranks share is not known as such.

    A wait is put down to `imbalance` only as far as the busiest rank has more work than the waiting one.

    >>> from pipeloom.ir.schedule import parse_program
    >>> from pipeloom.ir.stages import chain
    >>> from pipeloom.ir.timeline import Event
    >>> rows = ("0F0 0SEND_F0>1 0RECV_B0<1 0B0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0")
    >>> at = ((0, "0F0", 0, 1), (1, "1F0", 1, 2), (1, "1B0", 2, 4), (0, "0B0", 4, 6))
    >>> events = [Event(rank=r, stream="compute", action=a, start_s=s, end_s=e) for r, a, s, e in at]
    >>> timeline = Timeline(source="predicted", ranks=2, events=tuple(events))
    >>> explanation = explain_idle_time(parse_program(1, (0, 1), rows), timeline, chain(2))
    >>> explanation.by_reason
    {'fill': 3.0, 'drain': 2.0, 'warm-up': 1.0}
    >>> [step.action for step in explanation.path]
    ['0F0', '1F0', '1B0', '0B0']
    """
    causes = Causes(program, timeline, stages, cluster)
    step_s = timeline.end_s
    last = causes.last()
    idle: list[Idle] = []
    for rank in range(timeline.ranks):
        idle += _idle(causes, rank, step_s, last)
    path = list(causes.path(last, step_s)) if last is not None else []
    if last is not None and last.end_s < step_s:
        tail = replace(path[0], kind="overhead", start_s=last.end_s)
        path[:1] = [tail, replace(path[0], end_s=last.end_s)]
    return Explanation(
        source=timeline.source, ranks=timeline.ranks, step_s=step_s, idle=tuple(idle), path=tuple(path[::-1])
    )


def _idle(causes: Causes, rank: int, step_s: float, last: TimedSpan | None) -> Iterator[Idle]:
    budget_s = max(causes.busy_s) - causes.busy_s[rank]
    now_s = 0.0
    for item in causes.rows[rank]:
        if item.start_s > now_s:
            for piece in _wait(causes, item, now_s):
                if piece.reason != "imbalance":
                    yield piece
                    continue
                split_s = min(piece.end_s, piece.start_s + budget_s)
                budget_s -= split_s - piece.start_s
                if split_s > piece.start_s:
                    yield replace(piece, end_s=split_s)
                if split_s < piece.end_s:
                    yield replace(piece, start_s=split_s, reason="order")
        now_s = max(now_s, item.end_s)
    if now_s < step_s:
        other, on_rank = ("", -1) if last is None or last.rank == rank else (last.action, last.rank)
        yield Idle(rank=rank, start_s=now_s, end_s=step_s, reason="drain", waits_for=other, on_rank=on_rank)


def _wait(causes: Causes, item: TimedSpan, since_s: float) -> list[Idle]:
    """The wait of a rank from `since_s` until `item` begins, cut where the reason changes."""
    cause = causes.cause(item)
    waits_for, on_rank = "", -1
    if cause is not None and cause.kind == "transfer":
        maker = causes.maker(cause)
        waits_for, on_rank = maker.action, maker.rank
    elif cause is not None and (cause.rank != item.rank or cause.kind == "copy"):
        waits_for, on_rank = cause.action, cause.rank

    def piece(start_s: float, end_s: float, reason: Reason, root: TimedSpan | None = None) -> Idle:
        text, rank, waiting = ("", -1, "") if root is None else (root.action, root.rank, root.waiting)
        return Idle(
            rank=item.rank,
            start_s=start_s,
            end_s=end_s,
            reason=reason,
            action=item.action,
            waits_for=waits_for,
            on_rank=on_rank,
            root=text,
            root_rank=rank,
            waiting=waiting if reason == "link" else "",
        )

    if causes.before(item) is None:
        return [piece(since_s, item.start_s, "warm-up")]
    if cause is None or cause is causes.before(item):
        return [piece(since_s, item.start_s, "overhead")]
    root = causes.root(cause)
    reason = _reason(causes, item, root)
    closes = closes_update(item.action)
    pieces: list[Idle] = []
    if cause.end_s < item.start_s:
        pieces.append(piece(max(since_s, cause.end_s), item.start_s, "overhead", root))
    for step, start_s, end_s, itself in causes.back(cause, min(cause.end_s, item.start_s)):
        if end_s <= since_s:
            break
        why: Reason = reason
        if itself and step.kind != "compute":
            why = "link" if step.waiting else step.kind
        if closes:
            why = "reduce"
        start_s = max(since_s, start_s)
        if pieces and pieces[-1].reason == why:
            pieces[-1] = replace(pieces[-1], start_s=start_s)
        else:
            pieces.append(piece(start_s, end_s, why, step if itself and step.waiting else root))
    return pieces[::-1]


def _reason(causes: Causes, item: TimedSpan, root: TimedSpan | None) -> Reason:
    if root is None:
        return "fill"
    if root.waiting:
        return "link"
    if root.kind == "transfer":
        return "transfer"
    if root.kind == "copy":
        return "copy"
    mine, its = causes.busy_s[item.rank], causes.busy_s[root.rank]
    return "imbalance" if its > mine * (1 + MORE) else "order"
