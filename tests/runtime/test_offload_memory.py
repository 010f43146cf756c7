"""Resident memory really falls: a child process trains under a limit that its residuals would pass."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from processes import output, run

MIB = 1 << 20

CHILD = textwrap.dedent(
    """
    import json, resource, sys
    from dataclasses import replace
    from pathlib import Path
    import deep, runs
    import torch
    from pipeloom import Options, Pipeline

    deep.DEPTH, deep.WIDTH, ROWS, MICROBATCHES = 24, 32, 1 << 13, 12

    def resident():
        fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024, int(fields["VmRSS"].split()[0]) * 1024

    treatment, directory, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    job = deep.TANH
    plan = runs.even_plan(job, 1, microbatches=MICROBATCHES, microbatch_size=ROWS, schedule="gpipe")
    residuals = runs.residuals_of(job, plan)
    if treatment != "keep":
        plan = runs.treated_plan(job, plan, treatment)
    data = job.batch(0, ROWS * MICROBATCHES)
    with Pipeline(job, plan, options=Options(offload_dir=directory)) as pipeline:
        plan = replace(plan, caps=(int(1.02 * pipeline.expected.peak_bytes(0)),))
    with Pipeline(job, plan, options=Options(offload_dir=directory)) as pipeline:
        before = resident()[1]
        if limit:
            now = int(open("/proc/self/statm").read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (now + limit, now + limit))
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
    kept, away = (json.loads(output("-c", CHILD, way, tmp_path, 0)) for way in ("keep", "offload"))
    assert kept["losses"] == away["losses"] and away["files"] == 0
    one = kept["residuals"] // 12
    assert kept["rose"] > 0.95 * kept["residuals"]
    assert away["rose"] < 5 * one, (kept, away)
    assert away["host"] >= 10 * one


def test_residuals_larger_than_the_limit_train(tmp_path: Path) -> None:
    """The address space may grow by half of what all micro-batches keep."""
    whole = 12 * 24 * MIB
    kept, away = (run("-c", CHILD, treatment, tmp_path, whole // 2) for treatment in ("keep", "offload"))
    assert kept[0] != 0 and "can't allocate memory" in kept[2]
    assert away[0] == 0, away[2]
    assert json.loads(away[1])["residuals"] >= whole
