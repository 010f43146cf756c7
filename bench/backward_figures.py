"""Arithmetic of bench/zero_bubble.py: what splitting backwards costs, from measured actions.

Imports no torch. Seconds of an action are the median over all micro-batches and rounds that ran it. Two
comparisons:

split  Stage by stage: I and W together over B of a stage with the same ops, added up over the stages. B is
       the schedule's own where it runs both, as DualPipeV does in its published order; else that of another
       schedule whose plan has a stage of the same ops. Stages without one are left out, and named.
whole  All backward work of a micro-batch, on all stages, over that of 1F1B. Rows count their actions as
       they run them, so a mix of B with I and W weighs each by how often it occurs. Contains what cutting
       into more stages costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Cell: TypeAlias = tuple[int, str]
"""(stage, kind of action)."""
BACKWARD = ("B", "I", "W")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One schedule: ops of each stage, micro-batches of a step, and per cell the seconds of its actions in
    one round after the other."""

    ops: Sequence[Sequence[str]]
    microbatches: int
    rounds: Sequence[Mapping[Cell, Sequence[float]]]

    def seconds(self, stage: int, kind: str) -> float | None:
        """Median of one action, None if the schedule has none."""
        found = [s for table in self.rounds for s in table.get((stage, kind), ())]
        return statistics.median(found) if found else None

    def runs(self, stage: int, kind: str) -> int:
        """How many such actions a step has."""
        return len(self.rounds[0].get((stage, kind), ())) if self.rounds else 0

    def of_kind(self, kind: str) -> float:
        """Seconds of one micro-batch on all stages, as far as they run this kind."""
        return sum(self.seconds(stage, kind) or 0.0 for stage in range(len(self.ops)))

    @property
    def backward_s(self) -> float:
        """Seconds of all backward work of a step per micro-batch, each action at its median.

        >>> rounds = [{(0, "B"): [3.0, 3.2, 3.0], (0, "I"): [1.0], (0, "W"): [2.4]}]
        >>> round(Measured(ops=(("mm",),), microbatches=4, rounds=rounds).backward_s, 6)
        3.1
        """
        work = [
            self.runs(stage, kind) * (self.seconds(stage, kind) or 0.0)
            for stage in range(len(self.ops))
            for kind in BACKWARD
        ]
        return sum(work) / self.microbatches


def split_cost(name: str, all_measured: Mapping[str, Measured]) -> dict[str, object]:
    """I and W over B, stage by stage. None where the schedule splits nothing that can be compared.

    >>> full = Measured(ops=(("a",), ("b",)), microbatches=1, rounds=[{(0, "B"): [2.0], (1, "B"): [4.0]}])
    >>> halves = Measured(ops=(("a",), ("c",)), microbatches=1, rounds=[
    ...     {(0, "I"): [1.0], (0, "W"): [1.5], (1, "I"): [9.0], (1, "W"): [9.0]}])
    >>> split_cost("zb", {"1f1b": full, "zb": halves})
    {'split_over_full': 1.25, 'compared_with': ['1f1b'], 'stages_left_out': [1]}
    """
    own = all_measured[name]
    split, full = 0.0, 0.0
    sources: set[str] = set()
    missing = []
    for stage, ops in enumerate(own.ops):
        parts = [own.seconds(stage, kind) for kind in ("I", "W")]
        if None in parts:
            continue
        source = next((other for other in (name, *all_measured) if _full(all_measured[other], ops)), None)
        if source is None:
            missing.append(stage)
            continue
        split += sum(part or 0.0 for part in parts)
        full += _full(all_measured[source], ops) or 0.0
        sources.add(source)
    return {
        "split_over_full": split / full if full else None,
        "compared_with": sorted(sources),
        "stages_left_out": missing,
    }


def _full(measured: Measured, ops: Sequence[str]) -> float | None:
    """Seconds of B of the stage with these ops."""
    found = [measured.seconds(stage, "B") for stage, own in enumerate(measured.ops) if list(own) == list(ops)]
    return found[0] if found else None


def split_share(measured: Measured) -> float:
    """The share of a step's backwards that are split."""
    whole = sum(measured.runs(stage, "B") for stage in range(len(measured.ops)))
    split = sum(measured.runs(stage, "W") for stage in range(len(measured.ops)))
    return split / (whole + split) if whole + split else 0.0


def actions_of(name: str, base: str, all_measured: Mapping[str, Measured]) -> dict[str, object]:
    """What the actions of one schedule say, for the results."""
    own = all_measured[name]
    return {
        "seconds_of_a_microbatch": {
            kind: own.of_kind(kind) for kind in ("F", *BACKWARD) if own.of_kind(kind)
        },
        "backward_s": own.backward_s,
        "backward_over_1f1b": own.backward_s / all_measured[base].backward_s,
        "split_share": split_share(own),
        **split_cost(name, all_measured),
    }


def split_line(name: str, row: Mapping[str, object], base: str) -> str:
    """In words what splitting cost a schedule.

    >>> print(split_line("zb_v", {"split_over_full": 1.031, "compared_with": ["dualpipev"],
    ...     "stages_left_out": [], "split_share": 1.0, "backward_over_1f1b": 1.05}, "1f1b"))
    zb_v splits 100 % of its backwards; I + W take 1.031 of the B of the same stages (of dualpipev); all \
backward work takes 1.050 of 1f1b's
    """
    ratio, share = row["split_over_full"], row["split_share"]
    assert isinstance(share, float)
    said = "its stages have no like that runs B"
    if isinstance(ratio, float):
        sources, missing = row["compared_with"], row["stages_left_out"]
        assert isinstance(sources, list) and isinstance(missing, list)
        own = "its own" if sources == [name] else f"of {', '.join(sources)}"
        said = f"I + W take {ratio:.3f} of the B of the same stages ({own})"
        if missing:
            said += f", without stages {', '.join(map(str, missing))}, which no other schedule has"
    return (
        f"{name} splits {share:.0%} of its backwards; {said}; all backward work takes "
        f"{row['backward_over_1f1b']:.3f} of {base}'s"
    ).replace("%", " %")
