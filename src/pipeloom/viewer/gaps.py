"""What an explanation adds to the plot of a timeline: a reason in each gap, and the critical path."""

from __future__ import annotations

from typing import Any

from ..ir.explanation import Explanation
from .reasons import sentence
from .units import show_time, time_unit

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
