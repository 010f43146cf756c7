"""Timeline -> a text Gantt chart, and a report of a step. All of it can be read without colour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..ir.text import show_share, show_time
from ..ir.timeline import Lane, Timeline
from .comparisons import (
    Comparison,
    StageRow,
    memory_table,
    peak_figures,
    source_name,
    stage_table,
    step_figures,
    summary_table,
)
from .labels import Label, chunks, colour, computes, group_name, label
from .table import Table

IDLE = "·"
FILL = "─"
JOINED = "&"


def gantt(
    timeline: Timeline,
    *,
    width: int = 100,
    span_s: float | None = None,
    columns: int | None = None,
    beside: Mapping[str, Sequence[str]] | None = None,
    most_lines: int = 0,
) -> Group:
    """One line per rank of `width` columns for the step: `F3──` is the forward of micro-batch 3.

    Where ranks have several stages, these stand in front (`2F3`) if every block has room for it; if not, the
    letters of all but a rank's first stage are small (`f3`). Where several actions share a column, it shows
    the longest. The two of a pair are underlined, with `&` in between where there is room.

    span_s: charts with the same span have the same scale.
    columns: of a whole line, instead of `width`.  beside: heading -> one text per rank, to the right.
    most_lines: where blocks have no room for their micro-batch's number, the step goes on below, in bands of
        `width` columns, if that takes no more lines of ranks than these.
    """
    span_s = span_s or timeline.end_s
    ranks = range(timeline.ranks)
    names = [f"rank {r}" for r in ranks]
    margin = max(map(len, names), default=0)
    sides = [(max(map(len, (head, *texts))), head, texts) for head, texts in (beside or {}).items()]
    if columns is not None:
        width = max(20, columns - margin - 1 - sum(size + 2 for size, _, _ in sides))
    place = chunks(timeline)
    # Whether every block has room for its action with the stage's number.
    numbered = any(place.values()) and all(
        duration_s * width >= (len(action) - 1e-6) * span_s
        for lane in timeline.lanes
        for action, duration_s in zip(lane.actions, lane.end - lane.start, strict=True)
        if computes(label(action).group)
    )
    bands = _bands(timeline, width, span_s, most_lines // max(1, timeline.ranks))
    rows = [_row(timeline, r, width * bands, span_s, place, numbered) for r in ranks]
    parts = []
    if sides:
        heads = "".join(f"  {head:>{size}}" for size, head, _ in sides)
        parts.append(Text(f"{'':{margin + 1 + width}}{heads}", style="dim"))
    for band in range(bands):
        for r in ranks:
            texts = "" if band else "".join(f"  {own[r]:>{size}}" for size, _, own in sides)
            cells = rows[r][width * band : width * (band + 1)]
            parts.append(Text.assemble((f"{names[r]:>{margin}} ", "dim"), cells, texts))
        begin, end = (show_time(span_s * edge / bands) if edge else "0" for edge in (band, band + 1))
        parts.append(Text(f"{'':{margin}} {begin}{end:>{width - len(begin)}}", style="dim"))
    parts.append(_legend(timeline, place, numbered))
    if (most := _most_on_a_rank(timeline)) > width * bands:
        crowded = f"{most} actions of a rank in {width * bands} columns: each shows what fills most of it"
        parts.append(Text(crowded, style="dim"))
    return Group(*parts)


def _most_on_a_rank(timeline: Timeline) -> int:
    return max((int(np.count_nonzero(lane.end > lane.start)) for lane in timeline.lanes), default=0)


def _bands(timeline: Timeline, width: int, span_s: float, most: int) -> int:
    """Into how many bands of `width` columns a step goes so that every action has room for its number; 1 if
    that takes more than `most`."""
    if _most_on_a_rank(timeline) > 2 * most * width:  # an action that computes has two letters or more
        return 1
    needed = 0.0
    for lane in timeline.lanes:
        for action, duration_s in zip(lane.actions, lane.end - lane.start, strict=True):
            what = label(action)
            if computes(what.group) and duration_s > 0:
                letters = len(what.group + what.short)
                if letters * span_s > most * width * duration_s * (1 + 1e-9):
                    return 1
                needed = max(needed, letters / duration_s)
    return max(1, math.ceil(needed * span_s / width - 1e-9))


def _row(
    timeline: Timeline, rank: int, width: int, span_s: float, place: Mapping[int, int], numbered: bool
) -> Text:
    lane = timeline.lanes[rank]
    second = dict(timeline.pairs)
    joined = {*second, *second.values()}
    row, open_for = Text(), ""
    blocks = [
        (None if entry < 0 else lane.actions[entry], len(list(cells)))
        for entry, cells in groupby(_columns(lane, span_s, width))
    ]
    for (action, size), (following, _) in zip(blocks, (*blocks[1:], (None, 0)), strict=True):
        if action is None:
            row.append(IDLE * size, style="dim")
            continue
        what = label(action)
        chunk = place.get(what.stage, 0) if what.stage is not None else 0
        text = _block(what, size, chunk, numbered)
        if action == open_for and text.endswith(FILL):
            text = JOINED + text[:-1]
        open_for = ""
        if following is not None and second.get(action) == following:
            if text.endswith(FILL):
                text = text[:-1] + JOINED
            else:
                open_for = following  # the mark goes to the front of the other block, if it has room
        line = "underline " if action in joined else ""
        row.append(text, style=f"{line}black on {colour(what.group, chunk)}")
    return row


def _columns(lane: Lane, span_s: float, width: int) -> list[int]:
    """For each column the entry that has most of it, the last of several; -1 where more than half is idle."""
    if span_s <= 0:
        return [-1] * width
    start, end = lane.start / span_s * width, lane.end / span_s * width
    first = start.astype(np.int64)
    count = np.maximum(0, np.minimum(width - 1, end.astype(np.int64)) + 1 - first)
    entry = np.repeat(np.arange(len(count)), count)
    column = first[entry] + np.arange(len(entry)) - np.repeat(np.cumsum(count) - count, count)
    overlap = np.maximum(0.0, np.minimum(end[entry], column + 1) - np.maximum(start[entry], column))
    filled = np.full(width, -1)
    by_overlap = np.lexsort((entry, overlap, column))
    filled[column[by_overlap]] = entry[by_overlap]  # the last of each column stays
    busy = np.bincount(column, overlap, minlength=width)
    filled[busy < 0.5 - 1e-9] = -1
    return [int(entry) for entry in filled]


def _block(what: Label, size: int, chunk: int, numbered: bool) -> str:
    small = chunk > 0 and computes(what.group) and not numbered
    letters = what.group.lower() if small else what.group
    texts = [f"{letters}{what.short}", letters]
    if numbered:
        texts.insert(0, what.action)
    text = next((t for t in texts if len(t) <= size), letters[:size])
    return text + FILL * (size - len(text))


def _legend(timeline: Timeline, place: Mapping[int, int], numbered: bool) -> Text:
    """Every kind that takes time; the lighter colours of further stages, if ranks have them."""
    shown = sorted(
        (lane.start[i], rank, i)
        for rank, lane in enumerate(timeline.lanes)
        for i in lane.firsts
        if lane.end[i] > lane.start[i]
    )
    groups = dict.fromkeys(label(timeline.lanes[rank].actions[i]).group for _, rank, i in shown)
    legend = Text()
    for group in groups:
        legend.append(f" {group} ", style=f"black on {colour(group)}")
        legend.append(f" {group_name(group)}   ")
    legend.append(f"{IDLE} idle", style="dim")
    first = next((g for g in groups if computes(g)), None)
    if first is not None and (most := max(place.values(), default=0)) > 0:
        legend.append("   ")
        for chunk in range(1, min(most, 3) + 1):
            letter = first if numbered else first.lower()
            legend.append(f" {letter} ", style=f"black on {colour(first, chunk)}")
        legend.append(" in a further stage of the rank")
    if timeline.pairs:
        one, other = (label(action).group for action in timeline.pairs[0])
        legend.append("   ")
        legend.append(f"{one}{JOINED}{other}", style="underline")
        legend.append(" a pair, run as one unit")
    return legend


def report(
    *,
    predicted: Timeline | None = None,
    measured: Timeline | None = None,
    stages: Sequence[StageRow] = (),
    step_time: Comparison | None = None,
    width: int = 120,
) -> Iterator[RenderableType | Table]:
    """Drawings and tables of whichever of the two timelines is given, to print one after another.
    step_time: instead of that of the two.  width: columns of the drawings."""
    both = predicted, measured
    timelines = [t for t in both if t is not None]
    span_s = max((t.end_s for t in timelines), default=0.0)
    for timeline in timelines:
        share, name = show_share(timeline.bubble), source_name(timeline, timelines)
        yield Text(f"{name}: {show_time(timeline.step_s)}, bubble {share}", style="bold")
        yield gantt(timeline, width=max(20, min(width, 160) - 12), span_s=span_s)
    figures = [*step_figures(both, step_time), *peak_figures(both).values()]
    for table in (summary_table(figures), stage_table(stages, both), memory_table(both, stages)):
        if table.rows:
            yield Text()
            yield table


def console(*, stderr: bool = False) -> Console:
    """Standard output or standard error, where text stays as it is; in a file tables need no folding."""
    output = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not output.is_terminal:
        output.width = 120
    return output
