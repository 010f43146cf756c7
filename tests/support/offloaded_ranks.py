"""Ranks that are processes and train under a cap which only offloading keeps."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

from deep import ROWS, TANH

from pipeloom import Options, Pipeline
from pipeloom.ir.plan import Plan
from pipeloom.runtime.file_tier import FileCopy, FileTier
from pipeloom.runtime.open_tier import TIERS
from pipeloom.runtime.tier import TierOptions

MICROBATCHES = 8
SLOW_BYTES_PER_S = 2e6


class SlowFileTier(FileTier):
    """A file on a disk that takes its time: a copy there takes longer than a whole step without one."""

    def _write(self, copy: FileCopy) -> None:
        time.sleep(copy.bytes / SLOW_BYTES_PER_S)
        super()._write(copy)

    def _read_back(self, copy: FileCopy) -> None:
        time.sleep(copy.bytes / SLOW_BYTES_PER_S)
        super()._read_back(copy)


def open_slow_tier(options: TierOptions) -> FileTier:
    assert options.directory is not None
    return SlowFileTier(options.directory, options.rank)


def train(plan: Plan, folder: Path | None, *, slow: bool = False) -> dict[str, Any]:
    """Two steps. folder: where residuals go.  slow: as if it were on a slow disk."""
    usual = TIERS["cpu"]
    if slow:
        TIERS["cpu"] = open_slow_tier
    try:
        with Pipeline(TANH, plan, options=Options(offload_dir=folder)) as pipeline:
            losses = [pipeline.step(TANH.batch(step, MICROBATCHES * ROWS)) for step in range(2)]
            ledger = pipeline.ledger
            return {
                "losses": losses,
                "peak": ledger.peak,
                "cap": ledger.cap_bytes,
                "offloaded": ledger.host_peak,
                "rank": pipeline.rank,
            }
    finally:
        TIERS["cpu"] = usual


def compare_folders(free: Plan, capped: Plan, memory: Path, disk: Path, results: Path) -> None:
    """The same steps without a cap, offloading to memory, and to a slow disk; writes `results`/RANK."""
    warnings.simplefilter("ignore")  # that files in memory free none of it
    found = {
        "free": train(free, None),
        "memory": train(capped, memory),
        "slow disk": train(capped, disk, slow=True),
    }
    (results / str(found["free"]["rank"])).write_text(json.dumps(found))
