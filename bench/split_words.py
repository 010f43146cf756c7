"""What splitting the words of a head gains on two ranks here. `bench/clusters.py` says it of other machines.

    python bench/split_words.py ["half" "three quarters" "nine tenths"] [--rounds 12]

Llamas whose heads are about so much of their work, with whole words, in two and four parts, and as planned.
Two ranks of one thread take steps of all plans in turns. With h as the head's share, splitting gains 2 h at
most: a head of half the work fills its rank, and the rest of the model the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
import transformers as hf
from machine import on_ranks, parser_of, run_parts, tokens

from pipeloom import Job, Options, Pipeline, Plan, planning
from pipeloom.ir.profile import Profile
from pipeloom.ir.text import from_json, to_json
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.split_words import heads

LENGTH, WIDTH, MICROBATCHES, WARM_UP = 64, 256, 8, 2
SHARES = {"half": (16_000, 6, 4), "three quarters": (24_000, 2, 4), "nine tenths": (32_000, 1, 8)}
"""A head's share of the work -> words, layers and rows of a micro-batch."""


def llama(words: int, layers: int) -> Job:
    config = hf.LlamaConfig(
        vocab_size=words,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        use_cache=False,
    )
    return Job(model=lambda: hf.LlamaForCausalLM(config), batch=tokens(words, LENGTH))


def in_turns(share: str, texts: list[str], rounds: int) -> list[list[float]]:
    """On each rank: seconds of the steps of each plan, round by round."""
    words, layers, size = SHARES[share]
    job = llama(words, layers)
    plans = [from_json(text.encode(), Plan, what="plan") for text in texts]
    seconds: list[list[float]] = [[] for _ in plans]
    pipelines = [Pipeline(job, plan, options=Options(device="cpu", compare=False)) for plan in plans]
    for number in range(WARM_UP + rounds):
        batch = job.batch(number, MICROBATCHES * size)
        for pipeline, own in zip(pipelines, seconds, strict=True):
            torch.distributed.barrier()
            begin = time.perf_counter()
            pipeline.step(batch)
            torch.distributed.barrier()
            own.append(time.perf_counter() - begin)
    for pipeline in reversed(pipelines):
        pipeline.close()
    return [own[WARM_UP:] for own in seconds]


def share_of_head(captured: Captured, profile: Profile) -> float:
    (head,) = heads(captured)
    seconds = {name: cost.forward_s + cost.backward_s for name, cost in profile.costs.items()}
    return sum(seconds[name] for name in head.ops) / sum(seconds.values())


def measured(share: str, rounds: int) -> list[dict[str, Any]]:
    words, layers, size = SHARES[share]
    job = llama(words, layers)
    captured = planning.capture(job, size)
    of_ops = share_of_head(captured, planning.profile(captured))
    how = {"ranks": 2, "microbatches": MICROBATCHES, "microbatch_size": size, "captured": captured}
    plans = {parts: planning.plan(job, **how, split_words=parts) for parts in ("off", "2", "4", "auto")}
    took = on_ranks(in_turns, 2, share, [to_json(plan) for plan in plans.values()], rounds)[0]
    return [
        {
            "of the ops' time": of_ops,
            "asked": parts,
            "parts": max(plan.split_words.values(), default=1),
            "schedule": plan.schedule,
            "predicted s": plan.predicted_step_s,
            "measured s": statistics.median(seconds),
            "predicted times": plans["off"].predicted_step_s / plan.predicted_step_s,
            "times": statistics.median(a / b for a, b in zip(took[0], seconds, strict=True)),
        }
        for (parts, plan), seconds in zip(plans.items(), took, strict=True)
    ]


def main() -> int:
    parser = parser_of(__doc__, SHARES)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    return run_parts(args.parts, {share: partial(measured, share, args.rounds) for share in SHARES})


if __name__ == "__main__":
    sys.exit(main())
