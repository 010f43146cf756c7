"""Who waits for whom, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from .noticeboard import RankStatus


def who_waits(states: Sequence[RankStatus | None]) -> str:
    """A table of what each rank does and waits for, and the ranks that wait for each other, if any.

    >>> waits = State(doing="0B0", waits_for="1SEND_B0>0 from rank 1", waits_on=(1,), waiting_s=2)
    >>> print(who_waits([waits, None]))
    rank  does  waits for
    0     0B0   1SEND_B0>0 from rank 1, for 2.0 s
    1     ?     (it has not said anything yet)
    """
    rows = [("rank", "does", "waits for")]
    for rank, state in enumerate(states):
        if state is None:
            rows.append((str(rank), "?", "(it has not said anything yet)"))
        elif state.waits_for:
            waits = f"{state.waits_for}, for {state.waiting_s:.1f} s"
            rows.append((str(rank), state.doing, waits))
        else:
            rows.append((str(rank), state.doing, "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    circle = _circle(states)
    if circle:
        lines.append(" -> ".join(f"rank {rank}" for rank in circle) + ": they wait for each other")
    return "\n".join(lines)


def _circle(states: Sequence[RankStatus | None]) -> list[int]:
    """Ranks of which each waits on the next one, first and last the same; empty if there are none."""
    waits_on = {r: s.waits_on[0] for r, s in enumerate(states) if s is not None and len(s.waits_on) == 1}
    for start in waits_on:
        path = [start]
        while path[-1] in waits_on and len(path) <= len(waits_on):
            path.append(waits_on[path[-1]])
            if path[-1] == start:
                return path
    return []


def named(ranks: tuple[int, ...]) -> str:
    """The ranks in words: "rank 3", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks))
