"""What a rank does and waits for, as others get to know it, and the table of who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FINISHED = "finished"

SILENT_S = 2.0
"""A rank posts about twice a second; one that has not for so long is shown to be silent."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank does, as it last posted it.

    doing: the action it is at, such as "2F5".
    waits_for: what it waits for, such as "0SEND_F2>1 from rank 0"; empty while it does not wait.
    waits_on: the ranks that must bring it about.  waiting_s: seconds it has waited.
    beat: counts its postings.
    silent_s: seconds since whoever reads this last saw a new posting.
    """

    doing: str = ""
    waits_for: str = ""
    waits_on: tuple[int, ...] = ()
    waiting_s: float = 0.0
    beat: int = 0
    silent_s: float = 0.0

    @property
    def is_silent(self) -> bool:
        return self.silent_s >= SILENT_S and self.doing != FINISHED


def who_waits(statuses: Sequence[RankStatus | None]) -> str:
    """A table of what each rank does and waits for, and the ranks that wait for each other, if any.

    Of a rank that has fallen silent it shows what was last heard.

    >>> waits = RankStatus(doing="0B0", waits_for="1SEND_B0>0 from rank 1", waits_on=(1,), waiting_s=2)
    >>> print(who_waits([waits, RankStatus(doing="1F1", silent_s=12), None]))
    rank  does  waits for
    0     0B0   1SEND_B0>0 from rank 1, for 2.0 s
    1     1F1   - (silent for 12 s)
    2     ?     (it has not said anything yet)
    """
    rows = [("rank", "does", "waits for")]
    for rank, status in enumerate(statuses):
        if status is None:
            rows.append((str(rank), "?", "(it has not said anything yet)"))
            continue
        waits = f"{status.waits_for}, for {status.waiting_s:.1f} s" if status.waits_for else "-"
        silent = f" (silent for {status.silent_s:.0f} s)" if status.is_silent else ""
        rows.append((str(rank), status.doing, waits + silent))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    cycle = _cycle(statuses)
    if cycle:
        lines.append(" -> ".join(f"rank {rank}" for rank in cycle) + ": they wait for each other")
    return "\n".join(lines)


def _cycle(statuses: Sequence[RankStatus | None]) -> list[int]:
    """Ranks of which each waits on the next one, first and last the same; empty if there are none.

    A silent rank is in none: what it does now is not known, and there is the cause.
    """
    heard = {rank: s for rank, s in enumerate(statuses) if s is not None and not s.is_silent}
    waits_on = {rank: s.waits_on[0] for rank, s in heard.items() if len(s.waits_on) == 1}
    for start in waits_on:
        path = [start]
        while path[-1] in waits_on and len(path) <= len(waits_on):
            path.append(waits_on[path[-1]])
            if path[-1] == start:
                return path
    return []
