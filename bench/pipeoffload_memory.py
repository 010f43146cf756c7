"""Real ranks: what they hold of residuals as their number grows, with none, half and all stages offloaded."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from model import MICROBATCH, batch_of, job

from pipeloom import Options, Pipeline, Plan, plan
from pipeloom.api import capture, profile
from pipeloom.runtime.launch import launch

RANKS = (2, 4, 8)
CHUNKS = 2
STEPS = 3


def train(made: Plan, folder: Path, results: Path) -> None:
    """A few steps of one rank; its residual peaks go to a file."""
    with Pipeline(job(), made, options=Options(offload_dir=folder)) as pipeline:
        predicted = pipeline.expected
        losses = [pipeline.step(batch_of(step, MICROBATCH * made.microbatches)) for step in range(STEPS)]
        record = {
            "rank": pipeline.rank,
            "losses": losses,
            "residuals": pipeline.ledger.residual_peak,
            "host": pipeline.ledger.host_peak,
            "predicted": predicted.residual_peaks[pipeline.rank],
            "predicted_total": predicted.peak_bytes(pipeline.rank),
            "total": pipeline.ledger.peak,
        }
        (results / f"{pipeline.rank}.json").write_text(json.dumps(record))


def memory(quick: bool) -> dict[str, Any]:
    captured = capture(job(), MICROBATCH)
    measured = profile(captured)
    rows = []
    for ranks in RANKS[:1] if quick else RANKS:
        for name in (f"po:offload=0,v={CHUNKS}", f"po_h:v={CHUNKS}", f"po_f:v={CHUNKS}"):
            with tempfile.TemporaryDirectory() as text:
                folder, results = Path(text) / "away", Path(text) / "results"
                results.mkdir()
                made = plan(
                    job(),
                    stages=ranks,
                    microbatches=4 * ranks,
                    microbatch_size=MICROBATCH,
                    schedule=name,
                    captured=captured,
                    profiled=measured,
                    **({} if "offload=0" in name else {"offload_dir": folder, "treatments": ()}),
                )
                assert launch(train, ranks, args=(made, folder, results)) == 0
                found = [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]
            rows.append({"schedule": name, "ranks": ranks, "by_rank": found})
            most = max(each["residuals"] for each in found)
            print(f"  {name} on {ranks} ranks: residuals {most / 2**20:.2f} MiB", flush=True)
    return {"rows": rows}
