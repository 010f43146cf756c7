"""Where `bench/pipeoffload.py` keeps what it finds, section by section, as it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "pipeoffload.json"


def keep(section: str, found: dict[str, Any]) -> None:
    """Write what a section has found so far."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[section] = {**found, "machine": describe_machine()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
