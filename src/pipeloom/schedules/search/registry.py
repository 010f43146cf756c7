"""Engines: each looks for better orders in its own way. Adding one is a file and a line here."""

from __future__ import annotations

from .engine import Engine
from .engines import clock, exact, kernel, library, priorities, rows

ENGINES: dict[str, Engine] = {
    "library": library.run,
    "priorities": priorities.run,
    "clock": clock.run,
    "kernel": kernel.run,
    "rows": rows.run,
    "exact": exact.run,
}
"""In the order in which they run: later ones go on from what earlier ones found."""
