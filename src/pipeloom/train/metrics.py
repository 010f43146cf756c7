"""metrics.jsonl: one JSON object per step, on disk as soon as the step is over.

    {"step": 12, "loss": 2.9, "learning_rate": 0.0012, "step_s": 0.31, "tokens_per_s": 13213.0,
     "bubble": 0.11, "peak_bytes": [41943040, 40265318], "grad_norm": 1.7, "validation_loss": 2.8}

`validation_loss` stands only on steps after which validation ran, and on a line for step 0, which has
nothing else: the untrained model's. `learning_rate` and `grad_norm` stand only where they are known.
`rehearsed_step_s`, on steps before which the run rehearsed, is what the step was predicted to take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..ir.files import write_whole, writing


class Metrics:
    """Appends to the file; made anew for a resumed run, it first drops the steps that will be run again."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        self.path = path
        kept = [line for line in self._lines() if json.loads(line)["step"] <= after_step]
        write_whole(path, "".join(line + "\n" for line in kept))
        with writing(path):
            self._file = path.open("a")

    def write(self, values: Mapping[str, Any]) -> None:
        """One step's figures; those that are None are left out. Raises: ConfigError if the disk refuses."""
        with writing(self.path):
            self._file.write(json.dumps({k: v for k, v in values.items() if v is not None}) + "\n")
            self._file.flush()

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines()]

    def _lines(self) -> list[str]:
        """Whole lines only: a crash may have cut the last one."""
        if not self.path.exists():
            return []
        return self.path.read_text().rpartition("\n")[0].splitlines()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self.path):  # a line that the disk refused is tried once more here
            self._file.close()
