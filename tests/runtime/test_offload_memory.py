"""Resident memory really falls where residuals leave."""

import json
import textwrap
from pathlib import Path

import pytest
from processes import output

CHILD = textwrap.dedent(
    """
    import json, sys
    from dataclasses import replace
    from pathlib import Path
    import deep, runs
    import torch
    from batches import normal
    from pipeloom import Options, Pipeline

    deep.DEPTH, deep.WIDTH, ROWS, MICROBATCHES = 24, 32, 1 << 13, 12

    def resident():
        fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024, int(fields["VmRSS"].split()[0]) * 1024

    treatment, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    job = replace(deep.TANH, batch=normal(x=(deep.WIDTH,), y=(deep.WIDTH,)))
    plan = runs.even_plan(job, 1, microbatches=MICROBATCHES, microbatch_size=ROWS, schedule="gpipe")
    residuals = runs.residuals_of(job, plan)
    if treatment != "keep":
        plan = runs.treated_plan(job, plan, treatment)
    data = job.batch(0, ROWS * MICROBATCHES)
    with Pipeline(job, plan, options=Options(offload_dir=directory)) as pipeline:
        plan = replace(plan, caps=(int(1.02 * pipeline.expected.peak_bytes(0)),))
    with Pipeline(job, plan, options=Options(offload_dir=directory)) as pipeline:
        before = resident()[1]
        losses = [pipeline.step(data) for _ in range(2)]
        after, host = resident(), pipeline.ledger.host_peak
    print(json.dumps({
        "losses": losses, "rose": after[0] - before, "host": host, "files": len(list(directory.iterdir())),
        "residuals": MICROBATCHES * sum(r.bytes for r in residuals.values()),
    }))
    """
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc"),
]


def test_resident_memory_falls(tmp_path: Path) -> None:
    kept, away = (json.loads(output("-c", CHILD, way, tmp_path)) for way in ("keep", "offload"))
    assert kept["losses"] == away["losses"] and away["files"] == 0
    one = kept["residuals"] // 12
    assert kept["rose"] > 0.95 * kept["residuals"]
    assert away["rose"] < 5 * one, (kept, away)
    assert away["host"] >= 10 * one
