"""Resident memory really falls: a child process trains under a limit that its residuals would pass."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MIB = 1 << 20

CHILD = textwrap.dedent(
    """
    import json, resource, sys, threading
    from dataclasses import replace
    from pathlib import Path
    import torch
    from torch import nn
    from pipeloom import Job, Options, Pipeline
    from pipeloom.ir.memory_policy import MemoryPolicy
    from pipeloom.ir.plan import Plan, StagePlan
    from pipeloom.ir.stages import cut
    from pipeloom.schedules.registry import build
    from pipeloom.tracer.capture import capture
    from pipeloom.tracer.stage.trace import stage_residuals

    WIDTH, ROWS, DEPTH, MICROBATCHES = 32, 1 << 13, 24, 12

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    def batch(seed, rows):
        return {"x": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))}

    def resident():
        fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024, int(fields["VmRSS"].split()[0]) * 1024

    treatment, directory, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    job = Job(model=Wide, batch=batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    captured = capture(job, ROWS)
    stage_of = {op.name: 0 for op in captured.graph.ops if not op.cheap}
    stages = cut(captured.graph, stage_of)
    residuals = stage_residuals(captured, stages, 0)
    made = build("gpipe", stages, (0,), MICROBATCHES)
    plan = Plan(
        graph=captured.graph.fingerprint, planner="test", placement=(0,), schedule="gpipe",
        stages=(StagePlan(ops=stages.stages[0].ops),), schedule_rows=tuple(str(made).splitlines()),
        microbatches=MICROBATCHES, microbatch_size=ROWS,
        memory=MemoryPolicy(stages=({name: treatment for name in residuals},)),
    )
    data = batch(0, ROWS * MICROBATCHES)
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


def train(treatment: str, directory: Path, limit: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, treatment, str(directory), str(limit)],
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_resident_memory_falls(tmp_path: Path) -> None:
    found = {}
    for treatment in ("keep", "offload"):
        done = train(treatment, tmp_path)
        assert done.returncode == 0, done.stderr
        found[treatment] = json.loads(done.stdout)
    kept, away = found["keep"], found["offload"]
    assert kept["losses"] == away["losses"] and away["files"] == 0
    one = kept["residuals"] // 12
    assert kept["rose"] > 0.95 * kept["residuals"]
    assert away["rose"] < 5 * one, (kept, away)
    assert away["host"] >= 10 * one


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_residuals_larger_than_the_limit_train(tmp_path: Path) -> None:
    """The address space may grow by half of what all micro-batches keep."""
    whole = 12 * 24 * MIB
    kept, away = (train(treatment, tmp_path, whole // 2) for treatment in ("keep", "offload"))
    assert kept.returncode != 0 and "can't allocate memory" in kept.stderr
    assert away.returncode == 0, away.stderr
    assert json.loads(away.stdout)["residuals"] >= whole
