"""Timelines, memory and losses as plots of the page, which dresses text and grid in its own colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ir.explanation import Explanation
from ..ir.text import SizeUnit, byte_unit, show_share, show_time, time_unit
from ..ir.timeline import Event, MemoryCurve, Timeline
from .labels import chunks, colour, group_name, label
from .reasons import sentence
from .tables import source_name

Figure = Any
"""plotly.graph_objects.Figure. Plotly is imported where it is used: it is slow to load and has no types."""

# Pixels. All plots have the same margins, so that equal times lie above each other.
MARGIN = {"l": 62, "r": 14, "t": 40, "b": 44}
ROW_PX, NARROW_ROW_PX, TITLE_PX, TOP_PX = 54, 30, 44, 26
PANEL_PX, NARROW_PANEL_PX, GAP_PX = 112, 76, 16

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

PATH, PAIR = "critical path", "pair"
"""Names of traces: the page's switch shows and hides the first, the second frames pairs."""

PATH_HEIGHT = -0.35
"""Where the path runs within a row: above the numbers of the blocks."""

INK, CLEAR = "#10192b", "rgba(0,0,0,0)"
COLOURS = {"predicted": "#9a6be0", "measured": "#12a594"}
LOSS_COLOURS = ("#7d8fa9", "#e0592a", "#12a594", "#9a6be0")
CAP = "#d64545"
HEADROOM = 1.12


def timelines_figure(timelines: Sequence[Timeline], explanations: Sequence[Explanation] = ()) -> Figure:
    """One panel per timeline above each other, with the same time axis. An explanation with the same source
    puts a reason into each gap, and the critical path above the blocks, hidden at first."""
    from plotly.subplots import make_subplots

    span_s = max(t.end_s for t in timelines)
    rows = sum(t.ranks for t in timelines)
    height = rows * (ROW_PX if rows <= 16 else NARROW_ROW_PX) + TITLE_PX * (len(timelines) - 1)
    names = [source_name(t, timelines) for t in timelines]
    figure = make_subplots(
        rows=len(timelines),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=TITLE_PX / height if len(timelines) > 1 else 0,
        row_heights=[t.ranks for t in timelines],
        subplot_titles=[
            f"<b>{name}</b>  {show_time(t.step_s)}, bubble {show_share(t.bubble)}"
            for name, t in zip(names, timelines, strict=True)
        ],
    )
    for panel, timeline in enumerate(timelines, start=1):
        explained = [e for e in explanations if e.source == timeline.source]
        gaps = [_gaps(e, span_s) for e in explained]
        for bar in (*gaps, *_blocks(timeline, span_s), *_frames(timeline, span_s)):
            figure.add_bar(**bar, row=panel, col=1)
        for line in (line for e in explained for line in _path_lines(e, span_s)):
            figure.add_scatter(**line, row=panel, col=1)
        ticks = range(0, timeline.ranks, 1 if timeline.ranks <= 32 else 4)
        figure.update_yaxes(
            range=[timeline.ranks - 0.5, -0.55],
            tickvals=[rank + sum(LANES["compute"]) / 2 for rank in ticks],
            ticktext=[f"rank {rank}" for rank in ticks],
            ticklabelstandoff=6,
            fixedrange=True,
            zeroline=False,
            showgrid=False,
            row=panel,
            col=1,
        )
    figure.update_annotations(x=0, xanchor="left", yshift=2, font={"size": 13})
    _dress(figure, height=height, top=TOP_PX)
    _time_axis(figure, span_s, panels=len(timelines))
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"}, hovermode="closest")
    return figure


def legend(timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    """Name and colour of each group of actions, computing first. The page draws it: it can wrap."""
    groups: dict[str, int] = {}
    for timeline in timelines:
        for event in (e for e in timeline.events if e.duration_s > 0):
            groups.setdefault(label(event.action).group, list(LANES).index(_lane(event)))
    return [(group_name(g), colour(g)) for g in sorted(groups, key=lambda g: groups[g])]


def memory_figure(
    timelines: Sequence[Timeline], caps: Sequence[int] = (), size_unit: SizeUnit | None = None
) -> Figure | None:
    """One panel per rank: memory held over the step, measured filled, predicted dashed; None if none known.
    A cap is drawn only if it is so near that the curves do not become flat."""
    from plotly.subplots import make_subplots

    curves = [(t, c) for t in timelines for c in t.memory if c.sizes]
    if not curves:
        return None
    ranks = sorted({c.rank for _, c in curves})
    tallest = max(c.peak_bytes for _, c in curves)
    unit = size_unit or byte_unit(tallest)
    ends = f" {unit.name}" if size_unit is None else ""
    span_s = max(t.end_s for t in timelines)
    height = len(ranks) * (PANEL_PX if len(ranks) <= 8 else NARROW_PANEL_PX)
    figure = make_subplots(rows=len(ranks), cols=1, shared_xaxes=True, vertical_spacing=GAP_PX / height)
    listed: set[str] = set()
    for timeline, curve in curves:
        line = _curve(timeline, curve, source_name(timeline, timelines), unit=unit, ends=ends, span_s=span_s)
        name = line["name"]
        figure.add_scatter(**line, showlegend=name not in listed, row=ranks.index(curve.rank) + 1, col=1)
        listed.add(name)
    top = tallest / unit.bytes * HEADROOM
    for panel, rank in enumerate(ranks, start=1):
        title = {"text": f"rank {rank}<br>{unit.name}", "font": {"size": 11}}
        figure.update_yaxes(title=title, nticks=4, fixedrange=True, range=[0, top], row=panel, col=1)
        if rank < len(caps) and caps[rank] / unit.bytes <= top:
            note = {"text": f"cap {unit.show(caps[rank])}{ends}", "font": {"size": 10, "color": CAP}}
            dotted = {"dash": "dot", "width": 1.2, "color": CAP}
            figure.add_hline(y=caps[rank] / unit.bytes, row=panel, col=1, line=dotted, annotation=note)
    _dress(figure, height=height)
    _time_axis(figure, span_s, panels=len(ranks))
    figure.update_layout(hovermode="x unified")
    return figure


def loss_figure(losses: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """A curve with few points, such as validation, gets markers."""
    import plotly.graph_objects as go

    figure = go.Figure()
    most = max(map(len, losses.values()), default=0)
    for i, (name, points) in enumerate(losses.items()):
        sparse = len(points) <= max(30, most // 3)
        figure.add_scatter(
            x=[step for step, _ in points],
            y=[loss for _, loss in points],
            name=name,
            mode="lines+markers" if sparse else "lines",
            line={"color": LOSS_COLOURS[i % len(LOSS_COLOURS)], "width": 2.2 if sparse else 1.4},
            marker={"size": 7},
            hovertemplate="%{y:.4f}",
        )
    _dress(figure, height=240)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title={"text": "step", "standoff": 6}, zeroline=False)
    figure.update_yaxes(title={"text": "loss"}, zeroline=False)
    return figure


def _dress(figure: Figure, *, height: int, top: int = MARGIN["t"]) -> None:
    """Size, margins and a see-through background. `height` in pixels, without the margins."""
    figure.update_layout(
        template=None,
        height=height + top + MARGIN["b"],
        margin={**MARGIN, "t": top},
        legend=dict(orientation="h", x=0, y=1, yref="container", yanchor="top", traceorder="normal"),
        hoverlabel={"align": "left"},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
    )


def _time_axis(figure: Figure, span_s: float, *, panels: int) -> None:
    """The same time axis under all panels: zooming one zooms all."""
    unit, scale = time_unit(span_s)
    figure.update_xaxes(range=[0, span_s * scale * 1.005], minallowed=0, zeroline=False)
    figure.update_xaxes(title={"text": f"time, {unit}", "standoff": 6}, row=panels, col=1)


def _bars(spans: Sequence[tuple[int, float, float]], lane: str, span_s: float) -> dict[str, Any]:
    """spans: rank, begin and end in seconds of each bar."""
    scale = time_unit(span_s)[1]
    low, high = LANES[lane]
    return {
        "orientation": "h",
        "showlegend": False,
        "y": [rank for rank, _, _ in spans],
        "base": [round(start_s * scale, 4) for _, start_s, _ in spans],
        "x": [round((end_s - start_s) * scale, 4) for _, start_s, end_s in spans],
        "offset": low,
        "width": high - low,
    }


def _inside(texts: Sequence[str], color: str, size: int) -> dict[str, Any]:
    return {
        "text": texts,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": color, "size": size},
    }


def _blocks(timeline: Timeline, span_s: float) -> list[dict[str, Any]]:
    """One bar trace per group of actions and lane, computing first; else in the order of first use."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in sorted(timeline.events, key=lambda e: e.start_s):
        lane = _lane(event)
        least_s = 0.0 if lane == "compute" else SHORTEST * span_s
        if event.duration_s > 0 and event.duration_s >= least_s:
            groups.setdefault((lane, label(event.action).group), []).append(event)
    shades = chunks(timeline)
    other = {action: partner for pair in timeline.pairs for action, partner in (pair, pair[::-1])}
    edge = 0.8 if len(timeline.events) <= 1500 else 0.2
    lanes = list(LANES)
    bars = []
    for (lane, group), events in sorted(groups.items(), key=lambda item: lanes.index(item[0][0])):
        labels = [label(e.action) for e in events]
        pairs = [f", in a pair with {other[e.action]}" if e.action in other else "" for e in events]
        used = [shades.get(what.stage or 0, 0) for what in labels]
        bar = _bars([(e.rank, e.start_s, e.end_s) for e in events], lane, span_s) | {
            "name": group_name(group),
            "customdata": [
                (e.action, what.meaning + pair, show_time(e.start_s), show_time(e.duration_s))
                for e, what, pair in zip(events, labels, pairs, strict=True)
            ],
            "hovertemplate": (
                "<b>%{customdata[0]}</b>  %{customdata[1]}<br>"
                "rank %{y}, starts at %{customdata[2]}, takes %{customdata[3]}<extra></extra>"
            ),
            "marker": {
                "color": [colour(group, shade) for shade in used] if any(used) else colour(group),
                "line": {"width": edge, "color": "rgba(255,255,255,0.75)"},
            },
        }
        if lane == "compute":
            bars.append(bar | _inside([what.short for what in labels], INK, 11))
        else:
            bars.append(bar | {"textposition": "none"})
    return bars


def _lane(event: Event) -> str:
    return event.stream if event.stream in LANES else "compute"


def _gaps(explanation: Explanation, span_s: float) -> dict[str, Any]:
    """A see-through block over each gap, which tells its reason."""
    shown = [i for i in explanation.idle if i.duration_s >= SHORTEST * span_s]
    bars = _bars([(i.rank, i.start_s, i.end_s) for i in shown], "compute", span_s)
    return bars | {
        "name": "idle",
        **_inside([i.reason for i in shown], "#7d8797", 10),
        "customdata": [(i.reason, sentence(i), show_time(i.start_s), show_time(i.duration_s)) for i in shown],
        "hovertemplate": (
            "<b>idle: %{customdata[0]}</b><br>%{customdata[1]}<br>"
            "from %{customdata[2]}, for %{customdata[3]}<extra></extra>"
        ),
        "marker": {"color": "rgba(125,135,151,0.10)", "line": {"width": 0}},
    }


def _frames(timeline: Timeline, span_s: float) -> list[dict[str, Any]]:
    if not timeline.paired:
        return []
    spans = [(one.rank, one.start_s, other.end_s) for one, other in timeline.paired]
    return [
        _bars(spans, "compute", span_s)
        | {
            "name": PAIR,
            "customdata": [(f"{one.action}&{other.action}",) for one, other in timeline.paired],
            "hoverinfo": "skip",
            "marker": {"color": CLEAR, "line": {"width": 1.6, "color": INK}, "cornerradius": 3},
        }
    ]


def _path_lines(explanation: Explanation, span_s: float) -> list[dict[str, Any]]:
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
    return [line | {"line": {"color": color, "width": px}} for color, px in (("#ffffff", 5.5), (INK, 2.5))]


def _curve(
    timeline: Timeline, curve: MemoryCurve, source: str, *, unit: SizeUnit, ends: str, span_s: float
) -> dict[str, Any]:
    # Each size holds until the next time, the last one until the step's end. Sorted, because a run notes an
    # action's peak after the action, at the time it started.
    steps = sorted(zip(curve.times_s, curve.sizes, strict=True), key=lambda step: step[0])
    times = [*(t for t, _ in steps), max(timeline.end_s, steps[-1][0])]
    sizes = [*(s for _, s in steps), steps[-1][1]]
    name = source if curve.tier == "device" else f"{source}, {curve.tier}"
    ink = COLOURS.get(timeline.source, LOSS_COLOURS[0])
    dash = {("predicted", "device"): "dash", ("predicted", "host"): "dot"}.get((timeline.source, curve.tier))
    filled = timeline.source == "measured" and curve.tier == "device"
    return {
        "x": [round(t * time_unit(span_s)[1], 4) for t in times],
        "y": [round(s / unit.bytes, 4) for s in sizes],
        "name": name,
        "legendgroup": name,
        "mode": "lines",
        "line": {"shape": "hv", "color": ink, "width": 1.6, "dash": dash or "solid"},
        "fill": "tozeroy" if filled else "none",
        "fillcolor": "rgba(18,165,148,0.13)" if filled else None,
        "customdata": [f"{unit.show(s)}{ends}" for s in sizes],
        "hovertemplate": "%{customdata}",
    }
