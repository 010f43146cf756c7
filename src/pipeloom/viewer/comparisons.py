"""Figures of a step, predicted and measured, and their tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeAlias

from ..ir.explanation import REASONS, Explanation
from ..ir.plan import StageMemory
from ..ir.text import (
    SizeUnit,
    byte_unit,
    format_bytes,
    show_count,
    show_error,
    show_share,
    show_time,
    time_unit,
)
from ..ir.timeline import Timeline
from .labels import label
from .reasons import merged, sources
from .table import Column, Table, text_of

PARTS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
SHORT = dict(parameters="params", gradients="grads", optimizer="optim", residuals="resid", transient="trans")
"""Kinds of memory as terminals head them."""

Both: TypeAlias = tuple[Timeline | None, Timeline | None]
"""A predicted and a measured timeline, or one of them."""


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
    """One figure, predicted and measured; either may be missing.

    show: a value as text.  good_error: the error up to which the prediction is called good, None where the
    figure is a share itself and has no error.
    """

    name: str
    predicted: float | None
    measured: float | None
    show: Callable[[float], str] = show_time
    good_error: float | None = 0.05

    @property
    def error(self) -> float | None:
        """Predicted less measured, as a share of measured.

        >>> Comparison(name="step", predicted=1.5, measured=1.0).error
        0.5
        """
        if self.predicted is None or not self.measured or self.good_error is None:
            return None
        return self.predicted / self.measured - 1.0

    @property
    def error_text(self) -> str:
        return "" if self.error is None else show_error(self.error)

    @property
    def good(self) -> bool:
        return self.error is not None and abs(self.error) <= (self.good_error or 0.0)

    @property
    def value(self) -> str:
        """The measured figure, or the predicted one if there is no other."""
        return text_of(self.predicted if self.measured is None else self.measured, self.show)

    @property
    def detail(self) -> str:
        """What `value` is, or is to be compared with."""
        if self.measured is None:
            return "simulated"
        return "measured" if self.predicted is None else f"predicted {self.show(self.predicted)}"


def compare(name: str, both: Both, figure: Callable[[Timeline], float | None], **more: Any) -> Comparison:
    predicted, measured = (None if timeline is None else figure(timeline) for timeline in both)
    return Comparison(name=name, predicted=predicted, measured=measured, **more)


def step_figures(
    both: Both, step_time: Comparison | None = None, *, show: Callable[[float], str] = show_time
) -> list[Comparison]:
    """Step time and bubble; nothing without a timeline. step_time: instead of that of the two."""
    if all(timeline is None for timeline in both):
        return []
    return [
        step_time or compare("step time", both, lambda timeline: timeline.step_s, show=show),
        compare("bubble", both, lambda timeline: timeline.bubble, show=show_share, good_error=None),
    ]


def peak_figures(both: Both, unit: SizeUnit | None = None) -> dict[int, Comparison]:
    """Rank -> its peak memory, where a timeline knows it. unit: instead of bytes."""
    ranks = max((timeline.ranks for timeline in both if timeline is not None), default=0)
    more = {"show": format_bytes if unit is None else unit.show, "good_error": 0.03}
    ends = "" if unit is None else f", {unit.name}"
    peaks = {
        rank: compare(f"peak memory, rank {rank}{ends}", both, partial(peak_of, rank=rank), **more)
        for rank in range(ranks)
    }
    return {rank: p for rank, p in peaks.items() if p.predicted is not None or p.measured is not None}


def worst_peak(peaks: Iterable[Comparison]) -> list[Comparison]:
    """The rank whose peak is predicted worst; without a measurement the fullest rank; none of none."""

    def rank(peak: Comparison) -> tuple[bool, float, float]:
        return peak.error is not None, abs(peak.error or 0.0), peak.predicted or peak.measured or 0.0

    return sorted(peaks, key=rank)[-1:]


def peak_of(timeline: Timeline, rank: int) -> int | None:
    """The sum of the kinds, else the curve's peak; None where the timeline knows no memory.

    Of a measured step the kinds are those at the peak of the run so far, which its own curve may not reach:
    in another step a message may have stayed for longer.
    """
    if rank >= timeline.ranks:
        return None
    if rank < len(timeline.peaks) and timeline.peaks[rank]:
        return sum(timeline.peaks[rank].values())
    known = any(c.rank == rank and c.tier == "device" for c in timeline.memory)
    return timeline.peak_bytes(rank) if known else None


def source_name(timeline: Timeline, beside: Iterable[Timeline]) -> str:
    """What a timeline is called among those that are shown: one that no run stands beside is simulated."""
    alone = all(other.source == "predicted" for other in beside)
    return "simulated" if alone else timeline.source


def memory_kinds(timelines: Sequence[Timeline], least: float = 0) -> tuple[str, ...]:
    """Kinds of memory of which any timeline's peaks have more than `least` bytes, in the order of
    `StageMemory`, others after."""
    named = {kind: None for t in timelines for peak in t.peaks for kind, size in peak.items() if size > least}
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
    homes: dict[int, list[str]] = {}
    for row in stages:
        homes.setdefault(row.rank, []).append(str(row.stage))
    width = max(1, ranks // len(homes)) if homes else 1
    return {rank + r: ", ".join(names) for rank, names in homes.items() for r in range(width)}


def stage_seconds(timeline: Timeline) -> dict[tuple[int | None, str], float]:
    """(stage, "forward" or "backward") -> mean seconds of one micro-batch; backward is B, or I and W."""
    total: dict[tuple[int | None, str], float] = defaultdict(float)
    seen = defaultdict(set)
    for event in timeline.events:
        what = label(event.action)
        if event.stream == "compute" and what.group in PARTS:
            key = what.stage, PARTS[what.group]
            total[key] += event.duration_s
            seen[key].add(what.microbatch)
    return {key: seconds / len(seen[key]) for key, seconds in total.items()}


def stage_figures(stages: Sequence[StageRow], both: Both) -> dict[int, tuple[Comparison, Comparison]]:
    """Stage -> seconds of one micro-batch in its forward, and in its backward."""
    seconds = [{} if timeline is None else stage_seconds(timeline) for timeline in both]

    def of(stage: int, part: str) -> Comparison:
        predicted, measured = (times.get((stage, part)) for times in seconds)
        return Comparison(name=part, predicted=predicted, measured=measured)

    return {row.stage: (of(row.stage, "forward"), of(row.stage, "backward")) for row in stages}


def summary_table(figures: Iterable[Comparison]) -> Table:
    rows = [
        (f.name, *(v if v is None else f.show(v) for v in (f.predicted, f.measured)), f.error)
        for f in figures
    ]
    columns = (Column("", left=True), Column("predicted"), Column("measured"), Column("error", show_error))
    return Table("step", columns, rows).without_empty_columns()


def stage_table(stages: Sequence[StageRow], both: Both, *, errors: bool = False) -> Table:
    """errors: those of the predictions, too."""
    figures = stage_figures(stages, both)
    timelines = [timeline for timeline in both if timeline is not None]
    known = [
        s or 0.0 for parts in figures.values() for part in parts for s in (part.predicted, part.measured)
    ]
    unit, scale = time_unit(max(known, default=0.0))

    def show(seconds: float) -> str:
        return f"{seconds * scale:.2f}"

    names = ["predicted" if t is None else source_name(t, timelines) for t in both]
    columns = [Column("stage"), Column("rank"), Column("ops"), Column("parameters", show_count)]
    for part in ("forward", "backward"):
        columns += [Column(f"{part}\n{name}", show) for name in names]
        columns.append(Column(f"{part}\nerror", show_error))
    rows = [
        (
            *(row.stage, row.rank, row.ops, row.parameters),
            *(v for f in figures[row.stage] for v in (f.predicted, f.measured, f.error if errors else None)),
            row.contents,
        )
        for row in stages
    ]
    columns.append(Column("contents", left=True))
    return Table(f"stages, {unit} per micro-batch", columns, rows).without_empty_columns()


def memory_table(
    both: Both, stages: Sequence[StageRow] = (), caps: Sequence[int] = (), unit: SizeUnit | None = None
) -> Table:
    """Memory by kind at each rank's peak. unit: instead of one of bytes."""
    timelines = [timeline for timeline in both if timeline is not None]
    peaks = peak_figures(both)
    if unit is None:
        unit = byte_unit(max((p.predicted or p.measured or 0 for p in peaks.values()), default=0) / 10)
    kinds = memory_kinds(timelines, least=unit.bytes / 1000)
    homes = stages_by_rank(stages, max((t.ranks for t in timelines), default=0))
    sizes = (*kinds, "peak", "most residuals")
    columns = [Column("rank"), Column("stages"), Column("", left=True)]
    columns += [Column(name, unit.show, short=SHORT.get(name, "")) for name in sizes]
    columns.append(Column("error", show_error))
    rows = []
    for rank, peak in peaks.items():
        for timeline in timelines:
            held = timeline.peaks[rank] if rank < len(timeline.peaks) else {}
            most = timeline.residual_peaks[rank] if rank < len(timeline.residual_peaks) else None
            first, last = timeline is timelines[0], timeline is timelines[-1]
            rows.append(
                (
                    *((rank, homes.get(rank)) if first else ("", "")),
                    source_name(timeline, timelines),
                    *map(held.get, kinds),
                    peak_of(timeline, rank),
                    most,
                    peak.error if last else "",
                    caps[rank] if first and rank < len(caps) else "",
                )
            )
    columns.append(Column("cap", unit.show))
    return Table(f"memory at each rank's peak, {unit.name}", columns, rows).without_empty_columns()


def idle_table(explanations: Sequence[Explanation], *, alone: bool) -> Table:
    """Where idle time comes from: each reason, and the largest of its sources in the last explanation.

    alone: no run stands beside a prediction.
    """
    shares = [{reason: (share, own) for reason, _, share, own in merged(sources(e))} for e in explanations]
    reasons = sorted(set().union(*shares), key=lambda r: -max(s[r][0] for s in reversed(shares) if r in s))
    rows: list[tuple[Any, ...]] = []
    for reason in reasons:
        largest = next(s[reason][1] for s in reversed(shares) if reason in s)[0]
        each = (s[reason][0] if reason in s else None for s in shares)
        rows.append((reason, REASONS[reason], f"{largest.text}: {show_share(largest.share)}", *each))
    rows.append(("all", "", "", *(e.bubble for e in explanations)))
    columns = [Column(head, left=True) for head in ("idle", "", "largest source")]
    for e in explanations:
        columns.append(Column(f"of rank-time,\n{'simulated' if alone else e.source}", show_share))
    return Table("why ranks are idle", columns, rows)
