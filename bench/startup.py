"""From a command to the first step, and to the first plan.

    python bench/startup.py train [--runs 3]
    python bench/startup.py first-plan [--devices 64] [--layers 80] [--planner dawnpiper]      3 minutes

train       `pipeloom train` of one step of GPT-2 small (Hugging Face's, 124M parameters, 8 micro-batches of 2
            rows of 128 tokens) in two ranks of one thread each: in an empty cache folder, so that the model
            is compared with plain PyTorch and the contention of ranks is measured, then again
first-plan  a 70B-parameter Llama on 64 devices, at op granularity, captured on fake tensors, costs by
            roofline: where no kernel is compiled yet, and the next. `bench/startup.py:llama_70b` is the job.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from machine import parser_of, roofline_plan, run_parts, run_python, tokens

from pipeloom import Job, capture
from pipeloom.clusters.names import find_cluster
from pipeloom.kernel_compilation import kernels_compiled_beside

JOB = "gpt2_small.py:job"
SHAPE = ("pipeline.microbatches=8", "pipeline.microbatch_size=2", "validation_batches=1")
COMMAND = f"train --job {JOB} --steps 1 --out run {' '.join(f'--set {pair}' for pair in SHAPE)}"

MODEL = """import torch
from pipeloom import Job
from transformers import GPT2Config, GPT2LMHeadModel


def job():
    config = GPT2Config(use_cache=False)

    def batch(seed, size):
        ids = torch.randint(config.vocab_size, (size, 128), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    return Job(name="gpt2-small", model=lambda: GPT2LMHeadModel(config), batch=batch)
"""


def one_run(folder: Path, cache: str) -> dict[str, float]:
    """Seconds of the command, by the clock and of its processes."""
    (folder / "gpt2_small.py").write_text(MODEL)
    # Byte code is kept, as that of an installed package is.
    env = {"XDG_CACHE_HOME": cache, "PYTHONDONTWRITEBYTECODE": ""}
    load, before, start = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    run_python("-m", "pipeloom", *COMMAND.split(), cwd=folder, env=env)
    seconds, after = time.time() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"load": load, "seconds": seconds, "processor_s": processor_s}


def train(runs: int, cache: str) -> list[dict[str, float]]:
    rows = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="pipeloom-startup-") as folder:
            rows.append(one_run(Path(folder), cache))
    return rows


def llama_70b(*, layers: int = 80, length: int = 2048) -> Job:
    import transformers as hf

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    config = hf.LlamaConfig(**sizes, **heads, num_hidden_layers=layers, use_cache=False)
    return Job(model=lambda: hf.LlamaForCausalLM(config), batch=tokens(1000, length), name="llama-70b")


def plan_llama(layers: int, devices: int, planner: str) -> dict[str, Any]:
    """Capture and plan in this process, with code compiled beside the capture where there is none."""
    begin = time.perf_counter()
    with kernels_compiled_beside(planner) as wait_for_code:
        graph = capture(llama_70b(layers=layers), 1).graph
        wait_for_code(graph)
    captured = time.perf_counter()
    cluster = find_cluster(f"{devices // 8} nodes of 8 x h100")
    plan = roofline_plan(graph, cluster, schedule="1f1b", microbatches=2 * devices, planner=planner)
    end = time.perf_counter()
    seconds = {"capture_s": captured - begin, "search_s": end - captured, "together_s": end - begin}
    return {"ops": len(graph.ops), **seconds, "predicted_step_s": plan.predicted_step_s}


def first_plan(*how: object) -> list[dict[str, Any]]:
    call = f"import json, startup; print(json.dumps(startup.plan_llama(*{how!r})))"
    with tempfile.TemporaryDirectory() as folder:
        env = {"NUMBA_CACHE_DIR": folder, "XDG_CACHE_HOME": folder}
        plans = [run_python("-c", call, env=env).stdout.splitlines()[-1] for _ in range(2)]
    return [{"plan": name, **json.loads(text)} for name, text in zip(("first", "next"), plans, strict=True)]


def main() -> int:
    parser = parser_of(__doc__, ("train", "first-plan"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--planner", default="dawnpiper")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipeloom-startup-") as cache:
        parts: dict[str, Any] = {
            "train": partial(train, given.runs, cache),
            "first-plan": partial(first_plan, given.layers, given.devices, given.planner),
        }
        return run_parts(given.parts, parts)


if __name__ == "__main__":
    sys.exit(main())
