"""Timelines as pictures: the numbers that `templates/draw.js` draws, on the report page and in the studio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..ir.explanation import Explanation
from ..ir.text import SizeUnit, byte_unit, show_plain, show_share, show_time, time_unit
from ..ir.timeline import MemoryCurve, Timeline
from .comparisons import source_name
from .labels import STREAMS, chunks as chunks_of, colour, group_name, label
from .reasons import sentence

Picture: TypeAlias = dict[str, Any]

LANE = {stream: i for i, stream in enumerate(STREAMS)}
"""Streams that a rank's row has strips for; events of any other one are drawn as computing."""

TICKS = 10**8
"""Whole numbers that stand for times: as many as this for the span of a picture."""

SHORTEST = 2e-4
"""Waits and transfers shorter than this share of the step are not drawn: they could not be seen."""

MANY = 20_000
"""With more events than this only computing is drawn, and reasons are told where somebody asks."""

NO_DIGITS = str.maketrans("", "", "0123456789<>")


def picture(
    timeline: Timeline,
    title: str,
    *,
    explanation: Explanation | None = None,
    chunks: dict[int, int] | None = None,
    scale: tuple[str, float] | None = None,
) -> Picture:
    """What is drawn of a timeline.

    title: above it.  explanation: puts a reason into each gap, and adds the critical path.
    chunks: stage -> which of its rank's stages it is (`labels.chunks`); those behind the first are lighter.
    scale: name of a unit of time, and how many of it a second is; by default what suits the span.
    """
    span_s = timeline.end_s
    ticks = TICKS / span_s if span_s else 0.0
    unit, per_second = scale or time_unit(span_s)
    few = len(timeline.events) <= MANY
    streams, ranks, actions, starts, ends = timeline.listed(() if few else ("compute",))
    begin, end = (np.array(times, np.float64) for times in (starts, ends))
    lanes = np.array([LANE.get(stream, 0) for stream in streams], np.int64)
    least_s = np.where(lanes > 0, SHORTEST * span_s, 0.0)
    kept = np.flatnonzero((end - begin > 0) & (end - begin >= least_s)).tolist()
    groups: dict[str, int] = {}
    meanings: dict[str, str] = {}  # of one of each kind, in which the page puts the numbers of another
    group_of: dict[str, int] = {}  # text of an action without its numbers -> its group
    first: dict[int, int] = {}  # group -> its first event
    blocks: dict[str, list[Any]] = {
        "lane": lanes[kept].tolist(),
        "rank": [ranks[i] for i in kept],
        "start": np.rint(begin[kept] * ticks).astype(np.int64).tolist(),
        "end": np.rint(end[kept] * ticks).astype(np.int64).tolist(),
        "action": [actions[i] for i in kept],
    }
    kinds = [action.translate(NO_DIGITS) for action in blocks["action"]]
    for i, kind in enumerate(kinds):
        if kind not in group_of:
            what = label(blocks["action"][i])
            if what.stage is not None:
                meanings[kind] = what.meaning
            group_of[kind] = groups.setdefault(what.group, len(groups))
            first.setdefault(group_of[kind], i)
    blocks["group"] = [group_of[kind] for kind in kinds]
    shades = {stage: shade for stage, shade in (chunks or {}).items() if shade}
    drawn: Picture = {
        "title": title,
        "source": timeline.source,
        "ranks": timeline.ranks,
        "span": span_s * per_second,
        "unit": unit,
        "ticks": TICKS,
        "groups": [
            {
                "name": group_name(group),
                "lane": blocks["lane"][first[n]],
                "colours": [colour(group, s) for s in range(4)],
            }
            for group, n in groups.items()
        ],
        "meanings": meanings,
        "shades": shades,
        "blocks": blocks,
        "pairs": [
            [one.rank, round(one.start_s * ticks), round(other.end_s * ticks)]
            for one, other in timeline.paired
        ],
        "partner": {one: other for pair in timeline.pairs for one, other in (pair, pair[::-1])},
    }
    return drawn if explanation is None else drawn | reasons(explanation, span_s)


def reasons(explanation: Explanation, span_s: float) -> Picture:
    """What an explanation adds to the picture of a timeline of `span_s` seconds: gaps, and the path."""
    ticks = TICKS / span_s if span_s else 0.0
    points: list[tuple[int, int]] = []
    for step in explanation.path:
        ends = (step.rank, step.to_rank if step.kind == "transfer" else step.rank)
        points += zip((round(step.start_s * ticks), round(step.end_s * ticks)), ends, strict=True)
    idle = [
        [i.rank, round(i.start_s * ticks), round(i.end_s * ticks), i.reason, sentence(i)]
        for i in explanation.idle
        if i.duration_s >= SHORTEST * explanation.step_s
    ]
    return {"idle": idle, "path": list(dict.fromkeys(points))}


def pictures(
    timelines: Sequence[Timeline], explanations: Sequence[Explanation] = (), *, seconds: bool = True
) -> list[Picture]:
    """One picture per timeline, with the same unit of time; none if times are not in seconds."""
    scale = time_unit(max((t.end_s for t in timelines), default=0.0)) if seconds else ("", 1.0)
    show = show_time if seconds else show_plain
    by_source = {e.source: e for e in explanations}
    return [
        picture(
            timeline,
            f"{source_name(timeline, timelines)}  {show(timeline.step_s)}, "
            f"bubble {show_share(timeline.bubble)}",
            explanation=by_source.get(timeline.source),
            chunks=chunks_of(timeline),
            scale=scale,
        )
        for timeline in timelines
    ]


def memory_panels(
    timelines: Sequence[Timeline],
    caps: Sequence[int] = (),
    size_unit: SizeUnit | None = None,
    *,
    names: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    per_second: float | None = None,
) -> Picture | None:
    """Memory held over the step, one panel per rank; None if none is known.

    names: of the timelines in the legend.  ranks: of which curves are drawn, by default all.
    A cap is drawn only if it is so near that the curves do not become flat.
    """
    span_s = max((t.end_s for t in timelines), default=0.0)
    per_second = per_second or time_unit(span_s)[1]
    names = names or [source_name(t, timelines) for t in timelines]
    curves = [
        (timeline, name, curve)
        for timeline, name in zip(timelines, names, strict=True)
        for curve in _curves(timeline, ranks)
        if curve.sizes
    ]
    if not curves:
        return None
    tallest = max(curve.peak_bytes for _, _, curve in curves)
    unit = size_unit or byte_unit(tallest)
    top = tallest / unit.bytes * 1.12
    return {
        "unit": unit.name,
        "top": top or 1.0,
        "ranks": sorted({curve.rank for _, _, curve in curves}),
        "caps": {
            rank: [cap / unit.bytes, f"cap {unit.show(cap)}" + (f" {unit.name}" if size_unit is None else "")]
            for rank, cap in enumerate(caps)
            if cap / unit.bytes <= top
        },
        "curves": [
            {
                "rank": curve.rank,
                "name": name if curve.tier == "device" else f"{name}, {curve.tier}",
                "source": timeline.source,
                "tier": curve.tier,
                "points": _points(timeline, curve, per_second, unit.bytes),
            }
            for timeline, name, curve in curves
        ],
    }


def _curves(timeline: Timeline, ranks: Sequence[int] | None) -> list[MemoryCurve]:
    if ranks is None or not timeline.memory:
        return list(timeline.memory)
    tiers = len(timeline.memory) // timeline.ranks
    return [timeline.memory[tier * timeline.ranks + rank] for tier in range(tiers) for rank in ranks]


def _points(
    timeline: Timeline, curve: MemoryCurve, per_second: float, unit_bytes: float
) -> list[list[float]]:
    """[time, size from then on], in the order of time: a run notes an action's peak after the action, at the
    time it started."""
    times, sizes = np.array(curve.times_s, np.float64), np.array(curve.sizes, np.float64)
    order = np.argsort(times, kind="stable")
    times, sizes = times[order], sizes[order]
    times, sizes = np.append(times, max(timeline.end_s, times[-1])), np.append(sizes, sizes[-1])
    points: list[list[float]] = np.stack(
        [np.round(times * per_second, 6), np.round(sizes / unit_bytes, 4)], axis=1
    ).tolist()
    return points


def legend(drawn: Sequence[Picture]) -> list[tuple[str, str]]:
    """Name and colour of each group of actions, computing first."""
    groups = {group["name"]: group for one in drawn for group in one["groups"]}
    return [(g["name"], g["colours"][0]) for g in sorted(groups.values(), key=lambda g: g["lane"])]
