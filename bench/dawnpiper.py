"""DawnPiper (arXiv 2505.05856): the largest micro-batches that planners find a plan for.

    python bench/dawnpiper.py --models bert --minutes 9

BERT-large, GPT-2 1.5B and T5-3B in float32 with AdamW on 4 x A100-40GB, by roofline; 4 micro-batches per
device and step. Updates after a flush (1f1b) or with stashed weights (async_1f1b). Caps: what an A100 has,
and, tight, 1.0 and 1.3 times the least with which pipedream trains one row. Models are captured at two sizes
and interpolated. A model takes up to an hour of one core: no cell is begun after --minutes.

The models are Hugging Face's, without dropout; attention is one kernel, of T5 single ops.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Any

import transformers as hf
from machine import FREE, by_roofline, changed, parser_of, run_parts, tokens
from torch import nn

from pipeloom import Job, capture
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan
from pipeloom.ir.text import format_bytes
from pipeloom.plan_request import LARGEST_MICROBATCH, PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel, interpolate_sample, largest_size
from pipeloom.planner.request import PlanOptions
from pipeloom.planning import ModelAt


def language_model(name: str, kind: type[nn.Module], config: Any, length: int) -> Job:
    return Job(model=lambda: kind(config), batch=tokens(config.vocab_size, length), name=name)


def bert() -> Job:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.BertConfig(**sizes, **dropout, num_attention_heads=16)
    return language_model("BERT-large", hf.BertForMaskedLM, config, 512)


def gpt2() -> Job:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
    config = hf.GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False, **ends, **dropout)
    return language_model("GPT-2 1.5B", hf.GPT2LMHeadModel, config, 1024)


def t5() -> Job:
    sizes = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32}
    ends = {"tie_word_embeddings": False, "decoder_start_token_id": 0}
    config = hf.T5Config(dropout_rate=0.0, use_cache=False, **sizes, **ends)
    return language_model("T5-3B", hf.T5ForConditionalGeneration, config, 512)


MODELS: Mapping[str, Callable[[], Job]] = {"bert": bert, "gpt2": gpt2, "t5": t5}
"""At published sizes: arXiv 1810.04805, Radford et al. 2019, arXiv 1910.10683."""

PLANNERS = ("pipedream", "vpipe", "dawnpiper", "probe")
PER_DEVICE = 4
"""Micro-batches of a step for each device."""

CAPTURED = (2, 4)
"""Rows at which models are captured. Of one row, shapes need not follow those of several."""

SCHEDULES = {"flush": "1f1b", "stash": "async_1f1b"}
CLUSTER = "4 x a100-40"
CAPS = (None, 1.0, 1.3)
"""What the device has, or so many times the least cap of pipedream."""


def samples(graphs: Sequence[OpGraph], cluster: Cluster) -> ModelAt:
    """Size -> the model at it: shapes by interpolation, costs by roofline."""
    ends = [
        ProfiledModel(size=rows, graph=graph, profiles={})
        for rows, graph in zip(CAPTURED, graphs, strict=True)
    ]

    @lru_cache(maxsize=64)
    def take(size: int) -> ProfiledModel:
        return by_roofline(interpolate_sample(*ends, size).graph, cluster, size)

    return take


def planning(cluster: Cluster, weights: str, planner: str) -> PlanRequest:
    count = len(cluster.devices)
    options = PlanOptions(
        ranks=count, microbatches=PER_DEVICE * count, schedule=SCHEDULES[weights], planner=planner
    )
    return PlanRequest(cluster=cluster, options=options)


def planned(how: PlanRequest, take: ModelAt, size: int) -> Plan | None:
    """The plan for micro-batches of `size` rows, None if none fits."""
    try:
        return how.plan(take(size), explained=False)
    except InfeasibleError:
        return None


def least_cap(cluster: Cluster, weights: str, planner: str, take: ModelAt) -> int:
    """The smallest cap, to a thousandth, with which a planner that only looks at caps afterwards has a plan
    for micro-batches of one row."""
    freely = planned(planning(changed(cluster, memory_bytes=FREE), weights, planner), take, 1)
    assert freely is not None, "under a cap of a pebibyte everything fits"
    cap = max(stage.memory.total for stage in freely.stages)
    while planned(planning(changed(cluster, memory_bytes=cap), weights, planner), take, 1) is None:
        cap = ceil(cap * 1.001)
    return cap


def samples_per_s(plan: Plan) -> float:
    return plan.microbatches * plan.microbatch_size / plan.predicted_step_s


def compare_planners(cluster: Cluster, weights: str, take: ModelAt) -> dict[str, Any]:
    """Every planner's largest micro-batch and its speed there, and how many times larger and faster
    dawnpiper's is."""
    rows: dict[str, Any] = {}
    for planner in PLANNERS:
        how = planning(cluster, weights, planner)
        size = largest_size(range(1, LARGEST_MICROBATCH + 1), lambda size, how=how: how.fits(take(size)))
        plan = None if size is None else planned(how, take, size)
        rows[planner] = {"rows": plan.microbatch_size, "per_s": samples_per_s(plan)} if plan else {}
    ours = rows["dawnpiper"]
    for other in ("vpipe", "pipedream"):
        rows[f"over {other}"] = {key: ours[key] / rows[other][key] for key in rows[other] if ours}
    return rows


def cells(models: Sequence[str], minutes: float) -> list[dict[str, Any]]:
    """A row per model, way to update weights and cap."""
    until, cluster, found = time.monotonic() + 60 * minutes, find_cluster(CLUSTER), []
    for model in models:
        job = MODELS[model]()
        take = samples([capture(job, rows).graph for rows in CAPTURED], cluster)
        for weights, factor in product(SCHEDULES, CAPS):
            if time.monotonic() > until:
                return found
            cap = cluster.devices[0].memory_bytes
            if factor is not None:
                cap = ceil(factor * least_cap(cluster, weights, "pipedream", take))
            row = compare_planners(changed(cluster, memory_bytes=cap), weights, take)
            found.append({"model": job.name, "weights": weights, "cap": format_bytes(cap), **row})
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no cell after that time")
    given = parser.parse_args()
    return run_parts(["simulated"], {"simulated": lambda: cells(given.models, given.minutes)})


if __name__ == "__main__":
    sys.exit(main())
