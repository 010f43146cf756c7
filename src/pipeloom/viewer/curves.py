"""Memory over the step, and loss over the run, as plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ir.timeline import MemoryCurve, Timeline
from .axes import Figure, dress, time_axis
from .report_facts import source_name
from .units import SizeUnit, show_size, time_unit

COLOURS = {"predicted": "#9a6be0", "measured": "#12a594"}
LOSS_COLOURS = ("#7d8fa9", "#e0592a", "#12a594", "#9a6be0")
CAP = "#d64545"
PANEL_PX, NARROW_PANEL_PX, GAP_PX = 112, 76, 16
HEADROOM = 1.12


def memory_figure(
    timelines: Sequence[Timeline], caps: Sequence[int] = (), size_unit: SizeUnit | None = None
) -> Figure | None:
    """One panel per rank: bytes held over the step, measured filled, predicted dashed; None if none known.

    caps: bytes each rank may hold; one is drawn if it is near enough not to flatten the curves.
    """
    from plotly.subplots import make_subplots

    curves = [(t, c) for t in timelines for c in t.memory if c.sizes]
    if not curves:
        return None
    ranks = sorted({c.rank for _, c in curves})
    tallest = max(c.peak_bytes for _, c in curves)
    unit, scale = ("GiB", 1024**3) if tallest >= 1024**3 else ("MiB", 1024**2)
    if size_unit is not None:
        unit, scale = size_unit.name, size_unit.bytes
    span_s = max(t.end_s for t in timelines)
    height = len(ranks) * (PANEL_PX if len(ranks) <= 8 else NARROW_PANEL_PX)
    figure = make_subplots(rows=len(ranks), cols=1, shared_xaxes=True, vertical_spacing=GAP_PX / height)
    listed: set[str] = set()
    for timeline, curve in curves:
        name = source_name(timeline, timelines)
        line = _curve(timeline, curve, name, scale=scale, span_s=span_s, size_unit=size_unit)
        name = line["name"]
        figure.add_scatter(**line, showlegend=name not in listed, row=ranks.index(curve.rank) + 1, col=1)
        listed.add(name)
    top = tallest / scale * HEADROOM
    for panel, rank in enumerate(ranks, start=1):
        title = {"text": f"rank {rank}<br>{unit}", "font": {"size": 11}}
        figure.update_yaxes(title=title, nticks=4, fixedrange=True, range=[0, top], row=panel, col=1)
        if rank < len(caps) and caps[rank] / scale <= top:
            note = {"text": f"cap {show_size(caps[rank], size_unit)}", "font": {"size": 10, "color": CAP}}
            dotted = {"dash": "dot", "width": 1.2, "color": CAP}
            figure.add_hline(y=caps[rank] / scale, row=panel, col=1, line=dotted, annotation=note)
    dress(figure, height=height)
    time_axis(figure, span_s, panels=len(ranks))
    figure.update_layout(hovermode="x unified")
    return figure


def _curve(
    timeline: Timeline,
    curve: MemoryCurve,
    source: str,
    *,
    scale: int,
    span_s: float,
    size_unit: SizeUnit | None,
) -> dict[str, Any]:
    """Steps: each size holds until the next time, the last one until the step's end."""
    # A run notes an action's peak after the action, at the time it started.
    steps = sorted(zip(curve.times_s, curve.sizes, strict=True), key=lambda step: step[0])
    times = [*(t for t, _ in steps), max(timeline.end_s, steps[-1][0])]
    sizes = [*(s for _, s in steps), steps[-1][1]]
    name = source if curve.tier == "device" else f"{source}, {curve.tier}"
    ink = COLOURS.get(timeline.source, LOSS_COLOURS[0])
    dash = {("predicted", "device"): "dash", ("predicted", "host"): "dot"}.get((timeline.source, curve.tier))
    filled = timeline.source == "measured" and curve.tier == "device"
    return {
        "x": [round(t * time_unit(span_s)[1], 4) for t in times],
        "y": [round(s / scale, 4) for s in sizes],
        "name": name,
        "legendgroup": name,
        "mode": "lines",
        "line": {"shape": "hv", "color": ink, "width": 1.6, "dash": dash or "solid"},
        "fill": "tozeroy" if filled else "none",
        "fillcolor": "rgba(18,165,148,0.13)" if filled else None,
        "customdata": [show_size(s, size_unit) for s in sizes],
        "hovertemplate": "%{customdata}",
    }


def loss_figure(losses: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Loss over steps, one line per name; a curve with few points, such as validation, gets markers."""
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
    dress(figure, height=240)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title={"text": "step", "standoff": 6}, zeroline=False)
    figure.update_yaxes(title={"text": "loss"}, zeroline=False)
    return figure
