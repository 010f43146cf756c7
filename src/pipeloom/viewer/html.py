"""Timelines -> report.html: one page that holds everything, and opens without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..ir.explanation import Explanation
from ..ir.text import SizeUnit, dotted, show_plain, show_share, show_time, write_whole
from ..ir.timeline import Timeline
from .comparisons import (
    Comparison,
    StageRow,
    idle_table,
    memory_table,
    peak_figures,
    stage_table,
    step_figures,
    worst_peak,
)
from .labels import chunks
from .picture import legend, memory_panels, pictures
from .stage_graph import StageDrawing, StageEdge, draw_stages

TEMPLATES = Path(__file__).parent / "templates"


def environment(*folders: Path) -> Any:
    """What renders templates: of these folders, and of the viewer."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, TEMPLATES]),
        autoescape=jinja2.select_autoescape(["html", "svg"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["script_json"] = script_json
    return made


def script_json(value: object) -> str:
    """JSON for a script element, which no `<` in it can end early."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def show_setting(value: object) -> str:
    """
    >>> show_setting(True), show_setting(("a.txt", "b.txt")), show_setting(0.5), show_setting(None)
    ('yes', 'a.txt, b.txt', '0.5', '')
    """
    if isinstance(value, list | tuple):
        return ", ".join(map(show_setting, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value in (None, {}) else str(value)


def stages_svg(drawn: StageDrawing) -> str:
    text: str = environment().get_template("stages.svg").render(stage_graph=drawn)
    return text


def write_report(path: Path, *, title: str, **parts: Any) -> None:
    """Write `report_page(title=title, **parts)`."""
    write_whole(path, report_page(title=title, **parts))


def report_page(
    *,
    title: str,
    since: str = "",
    predicted: Timeline | None = None,
    measured: Timeline | None = None,
    stages: Sequence[StageRow] = (),
    edges: Sequence[StageEdge] = (),
    losses: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    config: Mapping[str, object] | None = None,
    caps: Sequence[int] = (),
    explanations: Sequence[Explanation] = (),
    size_unit: SizeUnit | None = None,
    note: str = "",
    step_time: Comparison | None = None,
    seconds: bool = True,
) -> str:
    """The page as text. What is not given is left out of the page.

    since: a sentence on which steps it is of.  edges: between the stages, which are then drawn as a graph.
    losses: name ("train", "validation") -> (step, loss) in order.  config: settings, nested or flat,
        of which those that are None or empty are left out.
    caps: bytes each rank may hold.  size_unit: what memory is counted in, instead of bytes.
    note: a sentence on how the two were compared.  step_time: instead of that of the two.
    seconds: whether times are in seconds, else in a unit that is not known.
    """
    both = predicted, measured
    timelines = [t for t in both if t is not None]
    drawn = [t for t in timelines if t.events]
    losses = {name: points for name, points in (losses or {}).items() if points}
    panels = pictures(drawn, explanations, seconds=seconds)
    figures: dict[str, Any] = {
        "timelines": panels,
        "memory": memory_panels(timelines, caps, size_unit, per_second=None if seconds else 1.0),
        "loss": [{"name": name, "points": points} for name, points in losses.items()],
    }
    peaks = peak_figures(both, size_unit).values()
    shares = {e.source: e.span_bubble for e in explanations}
    bubble = Comparison(
        name="bubble of the longest span",
        predicted=shares.get("predicted"),
        measured=shares.get("measured"),
        show=show_share,
        good_error=None,
    )
    cards = [
        *step_figures(both, step_time, show=show_time if seconds else show_plain),
        *([bubble] if shares else []),
        *worst_peak(peaks),
    ]
    page: str = (
        environment()
        .get_template("report.html")
        .render(
            title=title,
            since=since,
            note=note,
            cards=cards,
            losses=losses,
            legend=legend(panels),
            explained=bool(drawn and explanations),
            paired=any(t.paired for t in drawn),
            chunks=any(any(chunks(t).values()) for t in drawn),
            idle=idle_table(explanations, alone=measured is None)
            if any(e.idle for e in explanations)
            else None,
            figures=figures,
            stages=stage_table(stages, both, errors=True),
            replicas=max((row.replicas for row in stages), default=1),
            stage_graph=draw_stages(stages, edges, both) if edges else None,
            memory=memory_table(both, stages, caps, size_unit),
            config=[(key, text) for key, value in dotted(config or {}) if (text := show_setting(value))],
        )
    )
    return page
