"""Models cut at given places."""

from __future__ import annotations

from pipeloom.tracer.captured import Captured

ROWS = 2
"""Of a micro-batch."""


def places(captured: Captured) -> list[str]:
    """The ops that a cut assigns, in order."""
    return [op.name for op in captured.graph.ops if not op.cheap]


def split_at(captured: Captured, *cuts: int) -> dict[str, int]:
    """Op -> stage, with cuts in front of these places."""
    return {name: sum(at >= place for place in cuts) for at, name in enumerate(places(captured))}
