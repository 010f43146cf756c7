"""What splitting the words of a head gains: simulated for clusters, and measured on two ranks here.

    python bench/split_words.py [simulated] ["half" "three quarters" "nine tenths"] [--schedule 1f1b]

simulated: a GPT with 64,000 words (8 layers, width 512, context 256; micro-batches of 8, m = 16, 4 x a100-40)
and Gemma 2 with 256,000 words (26 layers, width 2304, 2,048 tokens, micro-batches of 1, m = 32, 8 x h100).

The others: Llamas whose heads are about so much of their work, with whole words, in two and four parts, and
as planned. Two ranks of one thread take steps of all plans in turns. With h as the head's share, splitting
gains 2 h at most: a head of half the work fills its rank, and the rest of the model the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from machine import next_tokens, on_ranks, parser_of, run_parts, tokens
from model import Layer
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job, Options, Pipeline, Plan, planning
from pipeloom.ir.profile import Profile
from pipeloom.ir.text import from_json, to_json
from pipeloom.planner.joint.search_record import searched_for
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


class Gpt(nn.Module):
    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Layer(width, heads, 4 * width, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            h = block(h)
        return fn.cross_entropy(self.head(self.norm(h)).flatten(0, 1), targets.flatten())


def gpt() -> Job:
    return Job(model=lambda: Gpt(64_000, 256, 512, 8, 8), batch=next_tokens(64_000, 256), name="GPT")


def gemma() -> Job:
    config = hf.Gemma2Config(vocab_size=256_000, num_hidden_layers=26, hidden_size=2304, use_cache=False)
    return Job(model=lambda: hf.Gemma2ForCausalLM(config), batch=tokens(256_000, 2048), name="Gemma 2")


CLUSTERS: tuple[tuple[Callable[[], Job], str, int, int, int], ...] = (
    (gpt, "4 x a100-40", 4, 16, 8),
    (gemma, "8 x h100", 8, 32, 1),
)
"""Model, devices, ranks, micro-batches and rows of each."""

WAYS = (("exact", "1f1b"), ("exact", "zb_v"), ("auto", None))


def simulated() -> list[dict[str, Any]]:
    rows = []
    for make, cluster, ranks, microbatches, size in CLUSTERS:
        job = make()
        captured = planning.capture(job, size)
        for planner, schedule in WAYS:
            steps: dict[str, float] = {}
            for words in ("off", str(ranks) if planner == "exact" else "auto"):
                plan = planning.plan(
                    job,
                    ranks=ranks,
                    microbatches=microbatches,
                    microbatch_size=size,
                    cluster=cluster,
                    planner=planner,
                    schedule=schedule,
                    split_words=words,
                    captured=captured,
                )
                steps[words] = plan.predicted_step_s
            whole_s, split_s = steps.values()
            rows.append(
                {
                    "model": job.name,
                    "devices": cluster,
                    "planner": planner,
                    "schedule": plan.schedule,
                    "parts": max(plan.split_words.values(), default=1),
                    "whole s": whole_s,
                    "split s": split_s,
                    "times": whole_s / split_s,
                    "over the bound": told["gap"] if (told := searched_for(plan)) else None,
                }
            )
    return rows


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


def measured(share: str, rounds: int, schedule: str | None) -> list[dict[str, Any]]:
    words, layers, size = SHARES[share]
    job = llama(words, layers)
    captured = planning.capture(job, size)
    of_ops = share_of_head(captured, planning.profile(captured))
    how = {"ranks": 2, "microbatches": MICROBATCHES, "microbatch_size": size, "captured": captured}
    how["schedule"] = schedule
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
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {"simulated": simulated}
    parser = parser_of(__doc__, ["simulated", *SHARES])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--schedule", help="of all plans; by default each takes the best")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts |= {share: partial(measured, share, args.rounds, args.schedule) for share in SHARES}
    return run_parts(args.parts, parts)


if __name__ == "__main__":
    sys.exit(main())
