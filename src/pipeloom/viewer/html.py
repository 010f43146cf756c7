"""Timelines -> report.html: one page that holds everything, plotly.js too, and opens without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..ir.explanation import REASONS, Explanation
from ..ir.text_files import write_whole
from ..ir.timeline import Timeline
from .axes import Figure
from .blocks import legend, timelines_figure
from .curves import loss_figure, memory_figure
from .labels import chunks
from .reasons import merged, sources
from .report_facts import (
    Comparison,
    StageRow,
    facts,
    memory_kinds,
    residual_peak_of,
    source_name,
    stage_comparisons,
    stage_seconds,
    stages_by_rank,
)
from .stage_graph import StageEdge, draw_stages
from .units import SizeUnit, show_count, show_error, show_share, show_size, show_time

TEMPLATES = Path(__file__).parent / "templates"
DASH = "–"
STEP_BAR, MEMORY_BAR = 0.05, 0.03
"""Errors of the prediction up to which a figure is marked as good: step time and peak memory."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One figure at the top: the main number, what it is compared with, and a mark for the error."""

    name: str
    value: str
    detail: str = ""
    error: str = ""
    good: bool = True


@dataclass(frozen=True, kw_only=True)
class HtmlTable:
    """Rows of text; the first `left` columns are aligned left, all others right.

    A row whose first cell is empty belongs to the row above.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


def write_report(
    path: Path,
    *,
    title: str,
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
    forecast: Comparison | None = None,
) -> None:
    """Write the page, whole or not at all.

    edges: between the stages, which are then drawn as a graph.
    losses: name ("train", "validation") -> (step, loss) in order.  config: settings, nested or flat.
    caps: bytes each rank may hold.  explanations: of the timelines with the same source.
    size_unit: what memory is counted in, instead of bytes.  note: a sentence on how the two were compared.
    forecast: step time as foretold before the run, and the run's middle one: the first card.
    What is not given is left out of the page.
    Raises: ConfigError if the file cannot be written.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    timelines = [t for t in (predicted, measured) if t is not None]
    drawn = [t for t in timelines if t.events]
    losses = {name: points for name, points in (losses or {}).items() if points}
    figures = {
        "timelines": timelines_figure(drawn, explanations) if drawn else None,
        "memory": memory_figure(timelines, caps, size_unit),
        "loss": loss_figure(losses) if losses else None,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("report.html").render(
        title=title,
        note=note,
        cards=[*_forecast_card(forecast), *_cards(predicted, measured, losses, explanations, size_unit)],
        legend=legend(drawn),
        explained=bool(drawn and explanations),
        paired=any(t.paired for t in drawn),
        chunks=any(any(chunks(t).values()) for t in drawn),
        idle=_idle_table(explanations, alone=measured is None) if any(e.idle for e in explanations) else None,
        figures={name: _embedded(figure) if figure else "" for name, figure in figures.items()},
        stages=_stage_table(stages, predicted, measured) if stages else None,
        replicas=max((row.replicas for row in stages), default=1),
        stage_graph=draw_stages(stages, edges, _stage_seconds(stages, timelines)) if edges else None,
        memory=_memory_table(predicted, measured, stages, caps, size_unit),
        memory_unit="" if size_unit is None else size_unit.name,
        config=_flat(config or {}),
        plotly=get_plotlyjs(),
    )
    write_whole(path, page)


def _embedded(figure: Figure) -> str:
    """JSON that may stand in a script element: no `<` can end it early."""
    return str(figure.to_json()).replace("<", "\\u003c")


def _forecast_card(forecast: Comparison | None) -> list[Card]:
    return [] if forecast is None else [_card(forecast.name, forecast, show_time, STEP_BAR)]


def _cards(
    predicted: Timeline | None,
    measured: Timeline | None,
    losses: Mapping[str, Sequence[tuple[int, float]]],
    explanations: Sequence[Explanation],
    size_unit: SizeUnit | None,
) -> list[Card]:
    known = facts(predicted, measured)
    cards = []
    if known.step.predicted or known.step.measured:
        cards.append(_card("step time", known.step, show_time, STEP_BAR))
        cards.append(_card("bubble", known.bubble, show_share, None))
    if explanations:
        shares = {e.source: e.span_bubble for e in explanations}
        spans = Comparison(name="", predicted=shares.get("predicted"), measured=shares.get("measured"))
        cards.append(_card("bubble of the longest span", spans, show_share, None))
    if (peak := known.worst_peak) is not None:
        name = f"peak memory, {peak.name}"
        if size_unit is not None:
            name = f"{name}, {size_unit.name}"
        cards.append(_card(name, peak, lambda size: show_size(size, size_unit), MEMORY_BAR))
    for name, points in losses.items():
        detail = f"from {points[0][1]:.3f} at step {points[0][0]}" if len(points) > 1 else ""
        cards.append(Card(name=f"{name} loss", value=f"{points[-1][1]:.3f}", detail=detail))
    return cards


def _card(name: str, both: Comparison, show: Callable[[float], str], bar: float | None) -> Card:
    if both.measured is None:
        assert both.predicted is not None
        return Card(name=name, value=show(both.predicted), detail="simulated")
    detail = "measured" if both.predicted is None else f"predicted {show(both.predicted)}"
    if bar is None or both.error is None:
        return Card(name=name, value=show(both.measured), detail=detail)
    good = abs(both.error) <= bar
    return Card(name=name, value=show(both.measured), detail=detail, error=show_error(both.error), good=good)


def _text(value: float | None, show: Callable[[float], str]) -> str:
    return DASH if value is None else show(value)


def _triple(both: Comparison, show: Callable[[float], str]) -> tuple[str, str, str]:
    return _text(both.predicted, show), _text(both.measured, show), _text(both.error, show_error)


def _stage_seconds(stages: Sequence[StageRow], timelines: Sequence[Timeline]) -> dict[int, list[str]]:
    """Of each stage the seconds of one micro-batch, measured or else predicted."""
    texts: dict[int, list[str]] = {}
    for row in stages:
        found = [stage_seconds(timeline, row.stage) for timeline in timelines]
        forward, backward = (next((s[i] for s in reversed(found) if s[i] is not None), None) for i in (0, 1))
        texts[row.stage] = [f"F {_text(forward, show_time)}", f"B {_text(backward, show_time)}"]
    return texts


def _stage_table(
    stages: Sequence[StageRow], predicted: Timeline | None, measured: Timeline | None
) -> HtmlTable:
    heads = ("stage", "contents", "rank", "ops", "parameters")
    parts = [
        f"{part}\n{what}" for part in ("forward", "backward") for what in ("predicted", "measured", "error")
    ]
    rows = []
    for row in stages:
        forward, backward = stage_comparisons(row, predicted, measured)
        first = (str(row.stage), row.contents, str(row.rank), str(row.ops), show_count(row.parameters))
        rows.append((*first, *_triple(forward, show_time), *_triple(backward, show_time)))
    return HtmlTable(heads=(*heads, *parts), rows=tuple(rows), left=2)


def _memory_table(
    predicted: Timeline | None,
    measured: Timeline | None,
    stages: Sequence[StageRow],
    caps: Sequence[int],
    size_unit: SizeUnit | None,
) -> HtmlTable | None:
    timelines = [t for t in (predicted, measured) if t is not None]
    known = facts(predicted, measured)
    homes = stages_by_rank(stages, max((t.ranks for t in timelines), default=0))
    if not known.peaks:
        return None
    least = 0.0 if size_unit is None else size_unit.bytes / 1000
    sizes = [peak for t in timelines for peak in t.peaks]
    kinds = [k for k in memory_kinds(timelines) if any(size.get(k, 0) > least for size in sizes)]
    show = partial(show_size, unit=size_unit)
    apart = ["most residuals"] if any(t.residual_peaks for t in timelines) else []
    compared, left = predicted is not None and measured is not None, ["rank", *(["stages"] if homes else [])]
    rows = []
    for peak in known.peaks:
        rank = int(peak.name.removeprefix("rank "))
        for timeline in timelines:
            first = timeline is timelines[0]
            held = timeline.peaks[rank] if rank < len(timeline.peaks) else {}
            total = peak.predicted if timeline is predicted else peak.measured
            most = [residual_peak_of(timeline, rank)] if apart else []
            cells = [_text(size, show) for size in (*map(held.get, kinds), total, *most)]
            error = _text(peak.error, show_error) if timeline is timelines[-1] else ""
            cap = show(caps[rank]) if rank < len(caps) and first else ""
            where = [str(rank), homes.get(rank, DASH)] if first else ["", ""]
            ends = [*([error] if compared else []), *([cap] if caps else [])]
            name = source_name(timeline, timelines)
            rows.append((*where[: len(left)], name, *cells, *ends))
    heads = (*left, "", *kinds, "peak", *apart, *(["error"] if compared else []), *(["cap"] if caps else []))
    return HtmlTable(heads=heads, rows=tuple(rows), left=len(left) + 1)


def _idle_table(explanations: Sequence[Explanation], *, alone: bool) -> HtmlTable:
    """Where idle time comes from: each reason, and the largest of its sources in the last explanation."""
    found = [{reason: (share, own) for reason, _, share, own in merged(sources(e))} for e in explanations]
    reasons = sorted(set().union(*found), key=lambda r: -max(f[r][0] for f in reversed(found) if r in f))
    rows = []
    for reason in reasons:
        own = next(f[reason][1] for f in reversed(found) if reason in f)
        largest = f"{own[0].text}: {show_share(own[0].share)}"
        shares = (show_share(f[reason][0]) if reason in f else DASH for f in found)
        rows.append((reason, REASONS[reason], largest, *shares))
    totals = (show_share(e.bubble) for e in explanations)
    rows.append(("all", "", "", *totals))
    names = ("simulated" if alone else e.source for e in explanations)
    heads = ("idle", "", "largest source", *(f"of rank-time,\n{name}" for name in names))
    return HtmlTable(heads=heads, rows=tuple(rows), left=3)


def _flat(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted names.

    >>> _flat({"model": {"width": 256}, "steps": 10})
    [('model.width', '256'), ('steps', '10')]
    """
    found: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", str(value)))
    return found
