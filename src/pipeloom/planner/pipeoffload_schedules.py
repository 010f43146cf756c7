"""Schedules that PipeOffload's user chooses among: stages per rank, groups, and what leaves.

PipeOffload (arXiv 2503.01328) leaves that to its user: the largest groups that fit, then uniform repeating
with as many stages offloaded as the link can take. Names say the group (`group`), the stages per rank (`v`),
how many of them leave (`offload`), or that a rank holds what its cap leaves (`fit`, see `fit_caps`), so that
a list of names is all that a search knows of schedules.
"""

from __future__ import annotations

from math import ceil

CHUNKS = (2, 4)
"""Stages per rank that are tried."""


def pipeoffload_schedules(
    ranks: int, most_stages: int, *, copies: bool = True, chunks: int | None = None
) -> tuple[str, ...]:
    """Schedules that are worth a try, by name.

    most_stages: into which the model can be cut.  copies: those that offload, too.
    chunks: stages on each rank, where only those schedules are asked for.

    >>> pipeoffload_schedules(2, 4, copies=False)
    ('1f1b', 'gis_h', 'zb_h1', 'gis:v=2', 'po:v=2', 'zb_v')
    >>> pipeoffload_schedules(2, 2)
    ('1f1b', 'zb_h1', '1f1b:offload=1', '1f1b:fit=1')
    >>> pipeoffload_schedules(2, 6, copies=False, chunks=3)
    ('gis:v=3', 'gis_h:v=3', 'po:v=3')
    """
    single = chunks in (None, 1)
    several = [v for v in (CHUNKS if chunks is None else (chunks,)) if 1 < v <= most_stages // ranks]
    names = ["1f1b"] * single + ["gis_h"] * (2 in several) + ["zb_h1"] * single
    families = ((v, family) for v in several for family in ("gis", "gis_h", "po"))
    names += [f"{family}:v={v}" for v, family in families if (v, family) != (2, "gis_h")]
    names += ["zb_v"] * (2 in several)
    if not copies:
        return tuple(names)
    names += ["1f1b:offload=1", "1f1b:fit=1"] * single
    for v in several:
        counts = sorted({1, ceil(v / 2), v})
        groups = sorted({ceil(ranks / 2), ranks})
        names += [f"po:v={v},offload={n}" for n in counts]
        names += [f"gis_g:group={g},v={v},offload={n}" for g in groups for n in counts]
        names += [f"po:v={v},fit=1", *(f"gis_g:group={g},v={v},fit=1" for g in groups)]
    return tuple(names)
