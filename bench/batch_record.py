"""The file of results of bench/max_batch.py: which cells there are, and which are of this code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from batch_figures import compared, groups, reasons
from machine import code_of, describe_machine

SCHEDULES = {"flush": "1f1b", "stash": "async_1f1b"}
DEVICES = (4, 8)
TIGHT = (1.0, 1.3)
FULL = "A100-40GB"


def keys(devices: Sequence[int]) -> list[tuple[int, str, str]]:
    """(devices, weights, cap) of a model's cells, the most important first. Under tight caps on 4 devices
    only, which is enough to tell."""
    full = [(count, weights, FULL) for count in devices for weights in SCHEDULES]
    tight = [(DEVICES[0], weights, f"x{factor}") for weights in SCHEDULES for factor in TIGHT]
    return full + (tight if DEVICES[0] in devices else [])


@cache
def code() -> str:
    """The version of the rooms that decide figures."""
    return code_of(("planner", "clusters", "simulator", "lowering", "profiler"))


class Record:
    """The file of results; written with every cell."""

    def __init__(self, target: Path) -> None:
        self.target, self.guard = target, Lock()

    def read(self) -> dict[str, Any]:
        return json.loads(self.target.read_text()) if self.target.exists() else {}

    def change(self, part: str, made: dict[str, Any]) -> None:
        """Write these entries of a part."""
        with self.guard:
            results = self.read()
            results["machine"] = describe_machine()
            results[part] = results.get(part, {}) | made
            self._write(results)

    def simulated(self, model: str, made: dict[str, Any]) -> None:
        """Write what is known of a model, with another cell where there is one, and what all cells say."""
        with self.guard:
            results = self.read()
            results["machine"] = describe_machine()
            known = results.setdefault("simulated", {})
            row = known.setdefault(model, {"cells": []})
            cells = row["cells"] + made.get("cells", [])
            order = keys(DEVICES)
            cells.sort(key=lambda c: order.index((c["devices"], c["weights"], c["cap"])))
            row.update(made | {"cells": cells})
            self._compare(results)
            self._write(results)

    def drop_old(self) -> None:
        """Leave out what other code has made."""
        with self.guard:
            results = self.read()
            for row in results.get("simulated", {}).values():
                row["cells"] = [made for made in row["cells"] if made.get("code") == code()]
                if row.get("captured_again", {}).get("code") != code():
                    row.pop("captured_again", None)
                row.pop("cpu_s", None)
            self._compare(results)
            self._write(results)

    def _compare(self, results: dict[str, Any]) -> None:
        found = [made for row in results.get("simulated", {}).values() for made in row["cells"]]
        results["compared"] = {name: compared(group) for name, group in groups(found).items()}
        results["reasons"] = {"said": reasons(found), "cells": len(found)}

    def _write(self, results: dict[str, Any]) -> None:
        fresh = self.target.with_suffix(".new")
        fresh.write_text(json.dumps(results, indent=1) + "\n")
        fresh.replace(self.target)
