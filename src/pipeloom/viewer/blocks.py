"""Timelines as a plot: one panel each, one row per rank, one block per action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ir.explanation import Explanation
from ..ir.timeline import Event, Timeline
from .axes import Figure, dress, time_axis
from .labels import Label, chunks, colour, group_name, label, partners
from .reasons import sentence
from .report_facts import source_name
from .units import show_share, show_time, time_unit

# What an explanation adds to the plot of a timeline: a reason in each gap, and the critical path.

LANES = {
    "compute": (-0.42, 0.24),
    "recv": (0.17, 0.24),
    "send": (0.29, 0.36),
    "d2h": (0.37, 0.42),
    "h2d": (0.42, 0.47),
    "host": (0.37, 0.47),
}
"""Stream -> its strip within a rank's row, which is 1 high. Waits lie in the gaps between computing."""

SHORTEST = 2e-4
"""Waits and transfers shorter than this share of the step are not drawn: they could not be seen."""

PATH = "critical path"
"""Name of the traces that the page's switch shows and hides."""

PATH_HEIGHT = -0.35
"""Where the path runs within a row: above the numbers of the blocks."""


def gaps(explanation: Explanation, span_s: float) -> dict[str, Any]:
    """One bar trace: a see-through block over each gap, which tells its reason."""
    scale = time_unit(span_s)[1]
    low, high = LANES["compute"]
    shown = [i for i in explanation.idle if i.duration_s >= SHORTEST * span_s]
    return {
        "orientation": "h",
        "name": "idle",
        "showlegend": False,
        "y": [i.rank for i in shown],
        "base": [round(i.start_s * scale, 4) for i in shown],
        "x": [round(i.duration_s * scale, 4) for i in shown],
        "offset": low,
        "width": high - low,
        "text": [i.reason for i in shown],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "#7d8797", "size": 10},
        "customdata": [(i.reason, sentence(i), show_time(i.start_s), show_time(i.duration_s)) for i in shown],
        "hovertemplate": (
            "<b>idle: %{customdata[0]}</b><br>%{customdata[1]}<br>"
            "from %{customdata[2]}, for %{customdata[3]}<extra></extra>"
        ),
        "marker": {"color": "rgba(125,135,151,0.10)", "line": {"width": 0}},
    }


def path_lines(explanation: Explanation, span_s: float) -> list[dict[str, Any]]:
    """The critical path as a line through its blocks, dark on light so that it is seen on any colour."""
    scale = time_unit(span_s)[1]
    points: list[tuple[float, float]] = []
    for step in explanation.path:
        ends = (step.rank, step.to_rank if step.kind == "transfer" else step.rank)
        for at_s, rank in zip((step.start_s, step.end_s), ends, strict=True):
            point = (round(at_s * scale, 4), rank + PATH_HEIGHT)
            if not points or points[-1] != point:
                points.append(point)
    line = {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "name": PATH,
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
        "visible": False,
    }
    return [
        {**line, "line": {"color": "#ffffff", "width": 5.5}},
        {**line, "line": {"color": "#10192b", "width": 2.5}},
    ]


PAIR = "pair"
"""Name of the trace that frames pairs."""

ROW_PX, NARROW_ROW_PX, GAP_PX, TOP_PX = 54, 30, 44, 26


def timelines_figure(timelines: Sequence[Timeline], explanations: Sequence[Explanation] = ()) -> Figure:
    """One panel per timeline above each other, with the same time axis.

    Explanations belong to the timelines with the same source: they put a reason into each gap, and the
    critical path above the blocks, not visible at first.
    """
    from plotly.subplots import make_subplots

    span_s = max(t.end_s for t in timelines)
    rows = sum(t.ranks for t in timelines)
    height = rows * (ROW_PX if rows <= 16 else NARROW_ROW_PX) + GAP_PX * (len(timelines) - 1)
    figure = make_subplots(
        rows=len(timelines),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=GAP_PX / height if len(timelines) > 1 else 0,
        row_heights=[t.ranks for t in timelines],
        subplot_titles=[_title(t, source_name(t, timelines)) for t in timelines],
    )
    for panel, timeline in enumerate(timelines, start=1):
        for explanation in (e for e in explanations if e.source == timeline.source):
            figure.add_bar(**gaps(explanation, span_s), row=panel, col=1)
        for bars in _bars(timeline, span_s):
            figure.add_bar(**bars, row=panel, col=1)
        if timeline.paired:
            figure.add_bar(**_outlines(timeline, span_s), row=panel, col=1)
        for explanation in (e for e in explanations if e.source == timeline.source):
            for line in path_lines(explanation, span_s):
                figure.add_scatter(**line, row=panel, col=1)
        figure.update_yaxes(**_rank_axis(timeline.ranks), row=panel, col=1)
    figure.update_annotations(x=0, xanchor="left", yshift=2, font={"size": 13})
    dress(figure, height=height, top=TOP_PX)
    time_axis(figure, span_s, panels=len(timelines))
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"}, hovermode="closest")
    return figure


def legend(timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    """Name and colour of each group of actions, computing first. The page draws it: it can wrap."""
    found: dict[str, int] = {}
    for timeline in timelines:
        for event in (e for e in timeline.events if e.duration_s > 0):
            found.setdefault(label(event.action).group, list(LANES).index(_lane(event)))
    return [(group_name(g), colour(g)) for g in sorted(found, key=lambda g: found[g])]


def _lane(event: Event) -> str:
    return event.stream if event.stream in LANES else "compute"


def _title(timeline: Timeline, name: str) -> str:
    return f"<b>{name}</b>  {show_time(timeline.step_s)}, bubble {show_share(timeline.bubble)}"


def _rank_axis(ranks: int) -> dict[str, Any]:
    ticks = range(0, ranks, 1 if ranks <= 32 else 4)
    middle = sum(LANES["compute"]) / 2
    return {
        "range": [ranks - 0.5, -0.55],
        "tickvals": [rank + middle for rank in ticks],
        "ticktext": [f"rank {rank}" for rank in ticks],
        "ticklabelstandoff": 6,
        "fixedrange": True,
        "zeroline": False,
        "showgrid": False,
    }


def _bars(timeline: Timeline, span_s: float) -> list[dict[str, Any]]:
    """One bar trace per group of actions and lane, computing first; else in the order of first use."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in sorted(timeline.events, key=lambda e: e.start_s):
        lane = _lane(event)
        least_s = 0.0 if lane == "compute" else SHORTEST * span_s
        if event.duration_s > 0 and event.duration_s >= least_s:
            groups.setdefault((lane, label(event.action).group), []).append(event)
    shades, scale = chunks(timeline), time_unit(span_s)[1]
    edge = 0.8 if len(timeline.events) <= 1500 else 0.2
    lanes, other = list(LANES), partners(timeline)
    return [
        _bar(events, (lane, group), scale, other) | {"marker": _marker(events, group, shades, edge)}
        for (lane, group), events in sorted(groups.items(), key=lambda item: lanes.index(item[0][0]))
    ]


def _outlines(timeline: Timeline, span_s: float) -> dict[str, Any]:
    """One bar trace: a frame around the two blocks of each pair."""
    low, high = LANES["compute"]
    scale = time_unit(span_s)[1]
    return {
        "orientation": "h",
        "name": PAIR,
        "showlegend": False,
        "y": [one.rank for one, _ in timeline.paired],
        "base": [round(one.start_s * scale, 4) for one, _ in timeline.paired],
        "x": [round((other.end_s - one.start_s) * scale, 4) for one, other in timeline.paired],
        "offset": low,
        "width": high - low,
        "customdata": [(f"{one.action}&{other.action}",) for one, other in timeline.paired],
        "hoverinfo": "skip",
        "marker": {"color": "rgba(0,0,0,0)", "line": {"width": 1.6, "color": "#10192b"}, "cornerradius": 3},
    }


def _bar(
    events: Sequence[Event], where: tuple[str, str], scale: float, partner: Mapping[str, str]
) -> dict[str, Any]:
    """where: lane and group.  partner: each action of a pair -> the other one."""
    lane, group = where
    low, high = LANES[lane]
    labels = [label(e.action) for e in events]
    return {
        "orientation": "h",
        "name": group_name(group),
        "showlegend": False,
        "y": [e.rank for e in events],
        "base": [round(e.start_s * scale, 4) for e in events],
        "x": [round(e.duration_s * scale, 4) for e in events],
        "offset": low,
        "width": high - low,
        "text": [what.short for what in labels] if lane == "compute" else None,
        "textposition": "inside" if lane == "compute" else "none",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "#10192b", "size": 11},
        "customdata": [
            (e.action, _said(what, partner), show_time(e.start_s), show_time(e.duration_s))
            for e, what in zip(events, labels, strict=True)
        ],
        "hovertemplate": (
            "<b>%{customdata[0]}</b>  %{customdata[1]}<br>"
            "rank %{y}, starts at %{customdata[2]}, takes %{customdata[3]}<extra></extra>"
        ),
    }


def _said(what: Label, partner: Mapping[str, str]) -> str:
    other = partner.get(what.action)
    return what.meaning if other is None else f"{what.meaning}, in a pair with {other}"


def _marker(events: Sequence[Event], group: str, shades: dict[int, int], edge: float) -> dict[str, Any]:
    used = [shades.get(label(e.action).stage or 0, 0) for e in events]
    one = used.count(0) == len(used)
    return {
        "color": colour(group) if one else [colour(group, shade) for shade in used],
        "line": {"width": edge, "color": "rgba(255,255,255,0.75)"},
    }
