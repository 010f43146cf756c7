"""The figures that every view shows: prediction against measurement, per step, rank and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ..ir.plan import StageMemory
from ..ir.timeline import Timeline
from .labels import label

BACKWARD = ("B", "I", "W")


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One line of the stage table, apart from what the timelines tell.

    parameters: number of elements.  contents: where it comes from, for instance "blocks.0 … blocks.3".
    replicas: pipelines that have such a stage; `stage` and `rank` are those of the first.
    """

    stage: int
    rank: int
    ops: int
    parameters: int
    contents: str = ""
    replicas: int = 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure, predicted and measured; either may be missing."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Predicted less measured, as a share of measured.

        >>> Comparison(name="step", predicted=1.5, measured=1.0).error
        0.5
        """
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """step: seconds.  bubble: share of rank-time.  peaks: bytes, one comparison per rank."""

    step: Comparison
    bubble: Comparison
    peaks: tuple[Comparison, ...]

    @property
    def worst_peak(self) -> Comparison | None:
        """The rank whose peak is predicted worst; without a measurement, the fullest rank."""
        if not self.peaks:
            return None
        known = [p for p in self.peaks if p.error is not None]
        if known:
            return max(known, key=lambda p: abs(p.error or 0.0))
        return max(self.peaks, key=lambda p: p.predicted or p.measured or 0.0)


def facts(predicted: Timeline | None, measured: Timeline | None) -> Facts:
    ranks = max(t.ranks for t in (predicted, measured, _NOTHING) if t is not None)
    peaks = (
        Comparison(name=f"rank {r}", predicted=peak_of(predicted, r), measured=peak_of(measured, r))
        for r in range(ranks)
    )
    return Facts(
        step=Comparison(
            name="step time",
            predicted=predicted.step_s if predicted else None,
            measured=measured.step_s if measured else None,
        ),
        bubble=Comparison(
            name="bubble",
            predicted=predicted.bubble if predicted else None,
            measured=measured.bubble if measured else None,
        ),
        peaks=tuple(p for p in peaks if p.predicted is not None or p.measured is not None),
    )


_NOTHING = Timeline(source="predicted", ranks=0, events=())


def peak_of(timeline: Timeline | None, rank: int) -> int | None:
    """The sum of the kinds, else the curve's peak; None where the timeline knows no memory.

    Of a measured step the kinds are those at the peak of the run so far, which its own curve may not reach:
    in another step a message may have stayed for longer.
    """
    if timeline is None or rank >= timeline.ranks:
        return None
    if rank < len(timeline.peaks) and timeline.peaks[rank]:
        return sum(timeline.peaks[rank].values())
    known = any(c.rank == rank and c.tier == "device" for c in timeline.memory)
    return timeline.peak_bytes(rank) if known else None


def residual_peak_of(timeline: Timeline | None, rank: int) -> int | None:
    """The most bytes of residuals that a rank holds at any time; None where that is not known."""
    known = timeline is not None and rank < len(timeline.residual_peaks)
    return timeline.residual_peaks[rank] if timeline is not None and known else None


def source_name(timeline: Timeline, beside: Sequence[Timeline]) -> str:
    """What a timeline is called among those that are shown: one that no run stands beside is simulated.

    >>> source_name(_NOTHING, [_NOTHING])
    'simulated'
    """
    alone = all(other.source == "predicted" for other in beside)
    return "simulated" if alone else timeline.source


def memory_kinds(timelines: Sequence[Timeline]) -> tuple[str, ...]:
    """Kinds of memory that any timeline's peaks name, in the order of `StageMemory`, others after."""
    named = {kind: None for t in timelines for peak in t.peaks for kind, size in peak.items() if size}
    order = [f.name for f in fields(StageMemory)]
    return (*(k for k in order if k in named), *(k for k in named if k not in order))


def stages_by_rank(stages: Sequence[StageRow], ranks: int = 0) -> Mapping[int, str]:
    """Rank -> its stages as text.

    stages: of the first pipeline.  ranks: how many there are; those of other pipelines stand behind its own.

    >>> rows = [StageRow(stage=s, rank=s % 2, ops=1, parameters=0) for s in range(4)]
    >>> stages_by_rank(rows)
    {0: '0, 2', 1: '1, 3'}
    >>> stages_by_rank([StageRow(stage=s, rank=2 * s, ops=1, parameters=0) for s in range(2)], ranks=4)
    {0: '0', 1: '0', 2: '1', 3: '1'}
    """
    found: dict[int, list[str]] = {}
    for row in stages:
        found.setdefault(row.rank, []).append(str(row.stage))
    width = max(1, ranks // len(found)) if found else 1
    return {rank + r: ", ".join(names) for rank, names in found.items() for r in range(width)}


def stage_seconds(timeline: Timeline | None, stage: int) -> tuple[float | None, float | None]:
    """Mean seconds per micro-batch that a stage spends in forward, and in backward (B, or I and W)."""
    if timeline is None:
        return None, None
    total = {"forward": 0.0, "backward": 0.0}
    seen: dict[str, set[int | None]] = {"forward": set(), "backward": set()}
    for event in timeline.events:
        what = label(event.action)
        if what.stage != stage or event.stream != "compute" or what.group not in ("F", *BACKWARD):
            continue
        part = "forward" if what.group == "F" else "backward"
        total[part] += event.duration_s
        seen[part].add(what.microbatch)
    forward, backward = (total[p] / len(seen[p]) if seen[p] else None for p in total)
    return forward, backward


def stage_comparisons(
    row: StageRow, predicted: Timeline | None, measured: Timeline | None
) -> tuple[Comparison, Comparison]:
    """Forward and backward seconds of one micro-batch in one stage."""
    (pf, pb), (mf, mb) = stage_seconds(predicted, row.stage), stage_seconds(measured, row.stage)
    return (
        Comparison(name="forward", predicted=pf, measured=mf),
        Comparison(name="backward", predicted=pb, measured=mb),
    )
