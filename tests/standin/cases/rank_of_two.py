"""One rank of a pipeline of two. Prints losses, a sum of the bits of parameters, waits of a step, reports."""

from __future__ import annotations

import json
import sys

import mutations
import products
import runs
import standin
import torch

import pipeloom

MICROBATCHES, ROWS = 4, 16


def main(device: str, mutation: str) -> None:
    job = products.job(64)
    plan = runs.even_plan(job, 2, microbatches=MICROBATCHES, microbatch_size=ROWS, schedule="1f1b")
    options = pipeloom.Options(device=device, timeout_s=60)
    with (
        mutations.applied(mutation),
        standin.collecting() as found,
        pipeloom.Pipeline(job, plan, options=options) as pipeline,
    ):
        losses = [pipeline.step(job.batch(seed, MICROBATCHES * ROWS)) for seed in range(2)]
        with standin.counted_syncs() as waits:
            losses.append(pipeline.step(job.batch(2, MICROBATCHES * ROWS)))
        params = {
            n: t.detach().cpu().view(torch.int32).sum().item() for n, t in pipeline.weights.params.items()
        }
    waited = [f"{wait.text} {wait.place.rpartition('/')[2].partition(':')[0]}" for wait in waits]
    reports = [f"{report.kind}: {report.text}" for report in found]
    print(json.dumps({"losses": losses, "params": params, "waits": waited, "reports": reports}))


if __name__ == "__main__":
    main(*sys.argv[1:])
