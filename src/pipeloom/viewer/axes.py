"""What the report's plots share. Colours of text and grid are left to the page: it knows light from dark."""

from __future__ import annotations

from typing import Any

from .units import time_unit

Figure = Any
"""plotly.graph_objects.Figure. Plotly is imported where it is used: it is slow to load and has no types."""

MARGIN = {"l": 62, "r": 14, "t": 40, "b": 44}
"""Pixels; the same for all plots, so that one time lies under the other."""

LEGEND = {
    "orientation": "h",
    "x": 0,
    "y": 1,
    "yref": "container",
    "yanchor": "top",
    "traceorder": "normal",
}


def dress(figure: Figure, *, height: int, top: int = MARGIN["t"]) -> None:
    """Size, margins and a see-through background. `height` in pixels, without the margins."""
    figure.update_layout(
        template=None,
        height=height + top + MARGIN["b"],
        margin={**MARGIN, "t": top},
        legend=LEGEND,
        hoverlabel={"align": "left"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )


def time_axis(figure: Figure, span_s: float, *, panels: int) -> None:
    """The same time axis under all panels: zooming one zooms all."""
    unit, scale = time_unit(span_s)
    figure.update_xaxes(range=[0, span_s * scale * 1.005], minallowed=0, zeroline=False)
    figure.update_xaxes(title={"text": f"time, {unit}", "standoff": 6}, row=panels, col=1)
