"""Gemma 2 (2B) on 8 x h100: the step of every schedule beside the bound, by roofline.

    python bench/gemma.py                                   # about 5 minutes of processor time
    python bench/gemma.py --planners exact --schedules zb_v,interleaved_1f1b

Its head over 256,000 words is one op, and takes longer than an eighth of the whole. The configuration is the
library's own for Gemma 2, 26 layers of width 2304, and no weights are made. For one plan:
`pipeloom plan bench/gemma.py:job --cluster "8 x h100" --ranks 8 --microbatches 32 --schedule zb_v`.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers as hf
from torch import Tensor

from pipeloom import Job, capture
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import PipeloomError
from pipeloom.ir.plan import Plan
from pipeloom.planner.planners import make_plan
from pipeloom.profiler.roofline import roofline
from pipeloom.schedules import registry

RANKS, MICROBATCHES, LENGTH = 8, 32, 2048


def job(*, length: int = LENGTH) -> Job:
    config = hf.Gemma2Config(use_cache=False, attn_implementation="eager")

    def batch(seed: int, size: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 1000, (size, length), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    return Job(model=lambda: hf.Gemma2ForCausalLM(config), batch=batch, name="gemma-2")


def rank_sums(plan: Plan) -> list[float]:
    """Seconds that each rank computes per micro-batch of the step."""
    sums = [0.0] * (max(plan.placement) + 1)
    for index, rank in enumerate(plan.placement):
        part = plan.stages[index % len(plan.stages)]
        sums[rank] += (part.forward_s + part.input_grad_s + part.weight_grad_s) / plan.replicas
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    trains = [name for name in registry.names() if name not in ("forward_only", "seq1f1b")]
    parser.add_argument("--planners", default="exact,dawnpiper")
    parser.add_argument("--schedules", default=",".join(trains))
    options = parser.parse_args()
    graph, cluster = capture(job(), 1).graph, find_cluster(f"{RANKS} x h100")
    profile = roofline(graph, cluster.devices[0])
    seconds = [profile.costs[op.name].forward_s + profile.costs[op.name].backward_s for op in graph.ops]
    share_s = sum(seconds) / RANKS
    print(
        f"{len(graph.ops)} ops, {sum(seconds) * 1e3:.1f} ms per micro-batch, "
        f"the longest {max(seconds) * 1e3:.1f} ms"
    )
    print("| planner | schedule | step s | bound s | busiest rank ms | fullest rank GiB | planned in s |")
    for planner in options.planners.split(","):
        for name in options.schedules.split(","):
            begin = time.process_time()
            try:
                plan = make_plan(
                    graph,
                    profile,
                    cluster,
                    ranks=RANKS,
                    schedule=name,
                    microbatches=MICROBATCHES,
                    planner=planner,
                    explained=False,
                )
            except PipeloomError as error:
                print(f"| {planner} | {name} | {error.message} | | | | {time.process_time() - begin:.1f} |")
                continue
            took = time.process_time() - begin
            # The longest op is on as many ranks as there are replicas.
            bound_s = MICROBATCHES * max(share_s, max(seconds) / plan.replicas)
            figures = f"{plan.predicted_step_s:.2f} | {bound_s:.2f} | {max(rank_sums(plan)) * 1e3:.1f}"
            print(
                f"| {planner} | {name} | {figures} | {max(plan.peaks) / 2**30:.1f} | {took:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
