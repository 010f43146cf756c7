"""What a timeline, predicted or measured, amounts to: step time, idle share, waiting, peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """One rank in one step, of several the mean. Times in seconds; peak_bytes on the device, peaks by kind at
    that moment."""

    rank: int
    busy_s: float
    wait_s: float
    peak_bytes: int
    peaks: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One step.

    bubble: share of rank-time without computing, until the last rank ends, as all ranks wait for the
        optimizer there.
    span_s, span_bubble: the longest time from a rank's first action to its last, and the share of it
        without computing: what counts where each rank begins its next step when it is done
        (post-validation, arXiv 2401.10241).
    """

    step_s: float
    bubble: float
    ranks: tuple[RankSummary, ...]
    span_s: float = 0.0
    span_bubble: float = 0.0


def summarise(timeline: Timeline) -> Summary:
    """What a timeline amounts to.

    >>> from pipeloom.ir.timeline import Event
    >>> one = Event(rank=0, stream="compute", action="0F0", start_s=0.0, end_s=1.0)
    >>> two = Event(rank=1, stream="compute", action="1F0", start_s=1.0, end_s=2.0)
    >>> summarise(Timeline(source="predicted", ranks=2, events=(one, two))).bubble
    0.5
    """
    totals = timeline.totals
    busy, step_s = totals.busy_s, timeline.step_s
    span_s = max((b - a for a, b in zip(totals.first_s, totals.last_s, strict=True) if a <= b), default=0.0)
    whole = timeline.ranks * step_s * timeline.steps
    return Summary(
        step_s=step_s,
        bubble=(whole - sum(busy)) / whole if whole else 0.0,
        span_s=span_s,
        span_bubble=1 - sum(busy) / (timeline.ranks * span_s) if span_s else 0.0,
        ranks=tuple(
            RankSummary(
                rank=rank,
                busy_s=busy[rank] / timeline.steps,
                wait_s=totals.wait_s[rank] / timeline.steps,
                peak_bytes=timeline.peak_bytes(rank),
                peaks=timeline.peaks[rank] if timeline.peaks else {},
            )
            for rank in range(timeline.ranks)
        ),
    )
