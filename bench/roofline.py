"""The roofline against the measured profile: GPT-2 small, ratio per class of ops and per stage.

    pipeloom cluster detect -o here.toml
    python bench/roofline.py --cluster here.toml [--length 256] [--rows 1] [--dropout 0.1]

Estimated over measured: 1 is right, 2 twice too slow. Times are those of the measuring thread, with the
allocator set as in a run. The shares of a measured cluster come from another, smaller model
(profiler/efficiency.py).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from time import thread_time

from machine import describe_machine
from rich.console import Console
from rich.table import Table

from pipeloom import Job
from pipeloom.api import capture
from pipeloom.clusters import find_cluster
from pipeloom.ir.graph import Op
from pipeloom.ir.profile import Profile
from pipeloom.profiler import RULES, UNKNOWN, base_name, measure, roofline
from pipeloom.runtime import keep_freed_memory

RESULTS = Path(__file__).parent / "results"
STAGES = 4


def gpt2(length: int, dropout: float) -> Job:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False)

    def batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(seed)
        tokens = torch.randint(config.vocab_size, (rows, length), generator=made)
        return {"input_ids": tokens, "labels": tokens}

    return Job(name="gpt2-small", model=lambda: GPT2LMHeadModel(config), batch=batch)


def seconds(ops: Iterable[Op], profile: Profile) -> float:
    costs = [profile.costs[op.name] for op in ops]
    return sum(c.forward_s + c.input_grad_s + c.weight_grad_s for c in costs)


def kind_of(op: Op) -> str:
    return "view" if op.view else RULES.get(base_name(op.target), UNKNOWN).kind


def main() -> None:
    parser = argparse.ArgumentParser(description="The roofline against the measured profile of GPT-2 small.")
    parser.add_argument("--cluster", default="cpu")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds to measure for")
    options = parser.parse_args()
    keep_freed_memory()
    job = gpt2(options.length, options.dropout)
    captured = capture(job, options.rows)
    real = measure(captured, batch=job.batch(0, options.rows), budget_s=options.budget, clock=thread_time)
    with warnings.catch_warnings(action="ignore"):
        guess = roofline(captured.graph, find_cluster(options.cluster).devices[0])
    groups: dict[str, list[Op]] = defaultdict(list)
    for index, op in enumerate(captured.graph.ops):
        groups[kind_of(op)].append(op)
        groups[f"stage {index * STAGES // len(captured.graph.ops)}"].append(op)
        groups["all"].append(op)
    table = Table("ops", "count", "measured ms", "estimated ms", "ratio")
    rows = {}
    for name, ops in sorted(groups.items()):
        measured_s, estimated_s = seconds(ops, real), seconds(ops, guess)
        ratio = estimated_s / measured_s if measured_s else float("nan")
        rows[name] = {"measured_s": measured_s, "estimated_s": estimated_s, "ratio": ratio}
        times = (f"{value * 1e3:.2f}" for value in (measured_s, estimated_s))
        table.add_row(name, str(len(ops)), *times, f"{ratio:.2f}")
    Console().print(table)
    result = {"machine": describe_machine(), "options": vars(options), "rows": rows, "notes": guess.notes}
    (RESULTS / "roofline.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
