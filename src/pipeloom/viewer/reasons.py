"""Idle time in words: one wait, a whole step's as a list of its largest sources, and the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.explanation import Explanation, Idle, PathStep, Reason
from ..ir.text import show_share
from .labels import label

ENDS = 20
"""Pieces of the critical path that are told at each end."""


def sentence(idle: Idle) -> str:
    """
    >>> sentence(Idle(rank=0, start_s=4, end_s=10, reason="fill", action="0B0", waits_for="1B0", on_rank=1))
    'rank 0 waits for 1B0 of rank 1, which is on its way: no rank is too busy to take it on'
    """
    who, what = f"rank {idle.rank}", f"{idle.waits_for} of rank {idle.on_rank}"
    if idle.reason == "warm-up":
        first = f": {idle.action} needs {what}" if idle.waits_for else ""
        return f"{who} waits for its first micro-batch{first}"
    if idle.reason == "drain":
        return f"{who} is done; {what} ends last" if idle.waits_for else f"{who} is done"
    if idle.reason == "overhead":
        return f"{who} has all that {idle.action} needs, and has not begun"
    if idle.reason == "copy":
        named = f"{idle.waits_for}, " if idle.waits_for else ""
        return f"{who} waits for {named}a copy that {idle.action} needs"
    if idle.reason == "reduce":
        return f"{who} waits for other ranks and the sum over them before {idle.action}"
    if idle.reason == "fill":
        return f"{who} waits for {what}, which is on its way: no rank is too busy to take it on"
    if idle.reason == "transfer":
        return f"{who} waits for {what}: a message is on its way"
    if idle.reason == "link":
        held = f"which {idle.root} of rank {idle.root_rank} holds"
        return f"{who} waits for {what}: {idle.waiting} waits for a shared link, {held}"
    more = ", and has more work in a step" if idle.reason == "imbalance" else ""
    return f"{who} waits for {what}: it is late as rank {idle.root_rank} was busy with {idle.root}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSource:
    """Idle time of one rank for one reason, added up. share: of all rank-time of the step."""

    reason: Reason
    rank: int
    seconds: float
    share: float
    text: str


def sources(explanation: Explanation) -> list[IdleSource]:
    """All idle time by reason, rank, what the rank waits for, and where that comes from; largest first."""
    total: dict[tuple[Reason, int, str], float] = {}
    for idle in explanation.idle:
        key = (idle.reason, idle.rank, _kind_of_wait(idle))
        total[key] = total.get(key, 0.0) + idle.duration_s
    whole_s = explanation.ranks * explanation.step_s
    return [
        IdleSource(reason=reason, rank=rank, seconds=seconds, share=seconds / whole_s, text=text)
        for (reason, rank, text), seconds in sorted(total.items(), key=lambda item: -item[1])
    ]


def _kind_of_wait(idle: Idle) -> str:
    what = f"{label(idle.waits_for).group} of rank {idle.on_rank}" if idle.waits_for else ""
    if idle.reason == "warm-up":
        return f"rank {idle.rank} waits for its first micro-batch"
    if idle.reason == "drain":
        return f"rank {idle.rank} is done" + (f" before rank {idle.on_rank}" if idle.waits_for else "")
    if idle.reason in ("overhead", "copy", "reduce"):
        return f"rank {idle.rank}, before {label(idle.action).group}"
    if idle.reason in ("fill", "transfer"):
        return f"rank {idle.rank} waits for {what}"
    if idle.reason == "link":
        held = f"{label(idle.root).group} of rank {idle.root_rank}"
        return f"rank {idle.rank} waits for {what}, held up on a shared link by {held}"
    if idle.root_rank == idle.rank:
        return f"rank {idle.rank} waits for {what}, whose input it made late itself"
    via = "" if idle.root_rank == idle.on_rank else f", held up by rank {idle.root_rank}"
    return f"rank {idle.rank} waits for {what}{via}"


def merged(causes: Sequence[IdleSource]) -> list[tuple[Reason, float, float, list[IdleSource]]]:
    """(reason, seconds, share, its sources), largest first."""
    by_reason: dict[Reason, list[IdleSource]] = {}
    for cause in causes:
        by_reason.setdefault(cause.reason, []).append(cause)
    groups = [(r, sum(s.seconds for s in of), sum(s.share for s in of), of) for r, of in by_reason.items()]
    return sorted(groups, key=lambda group: -group[1])


def piece_text(piece: PathStep) -> str:
    what = f"{piece.action} on rank {piece.rank}"
    if piece.kind == "overhead":
        what = f"overhead before {what}"
    elif piece.waiting:
        what += f", on the link that {piece.waiting} waits for"
    return f"from {piece.start_s:<8.6g} for {piece.end_s - piece.start_s:<8.6g} {what}"


def path_lines(path: Sequence[PathStep]) -> list[str]:
    """The time of each kind of piece, and the first and the last pieces.

    >>> path_lines([PathStep(kind="compute", rank=0, action="0F0", start_s=0, end_s=1)])
    ['compute 1 (100.0 %)', 'from 0        for 1        0F0 on rank 0']
    """
    seconds: dict[str, float] = {}
    for piece in path:
        seconds[piece.kind] = seconds.get(piece.kind, 0.0) + piece.end_s - piece.start_s
    whole_s = sum(seconds.values())
    kinds = [f"{kind} {s:.6g} ({show_share(s / whole_s)})" for kind, s in seconds.items()]
    lines = list(map(piece_text, path))
    if (hidden := len(lines) - 2 * ENDS) > 0:
        lines[ENDS:-ENDS] = [f"{hidden} more"]
    return [", ".join(kinds), *lines]
