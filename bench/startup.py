"""From a command to the first step or the first plan, and what that time holds.

    python bench/startup.py train [--runs 3]
    python bench/startup.py first-plan [--devices 64] [--layers 80] [--planner dawnpiper]      3 minutes

train       `pipeloom train` of GPT-2 small in two ranks of one thread each: the first time in an empty cache
            folder, so that the model is compared with plain PyTorch and the contention of ranks is measured,
            then again as everybody's second run
first-plan  a 70B-parameter Llama on 64 devices, at op granularity, captured on fake tensors, costs by
            roofline: where no kernel is compiled yet, and the next. `bench/startup.py:llama_70b` is the job.

Every process of `train` notes when it enters and leaves some functions: seconds by the clock, and
of its processor. What is within another phase is counted there, too. The model is Hugging Face's GPT-2 with
124M parameters, 8 micro-batches of 2 rows of 128 tokens. It wants two quiet cores: the load is in the table.
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
from statistics import median
from typing import Any

from machine import parser_of, print_table, roofline_plan, run_parts, run_python, tokens

from pipeloom import Job, capture
from pipeloom.clusters.names import find_cluster
from pipeloom.kernel_compilation import kernels_compiled_beside

LIMIT_S = 20.0
JOB = "gpt2_small.py:job"
SHAPE = ("pipeline.microbatches=8", "pipeline.microbatch_size=2", "validation_batches=1")
COMMAND = f"train --job {JOB} --steps 1 --out run {' '.join(f'--set {pair}' for pair in SHAPE)}"
PHASES = {
    "torch": ("",),
    "transformers.models.gpt2.modeling_gpt2": ("",),
    "pipeloom.pipeline": ("", *(f"Pipeline.{name}" for name in ("__init__", "predict", "evaluate"))),
    "pipeloom.step_run": ("FlushedRun.feed",),
    "pipeloom.caches": ("contention",),
    "pipeloom.plan_advice": ("plan_with_advice",),
    "pipeloom.verification": ("verify_once",),
    "pipeloom.rank_stages": ("RankStages.weights", "make_variant"),
    "pipeloom.ranks": ("join_ranks",),
    "pipeloom.profiler.measure_ops": ("measure",),
    "pipeloom.tracer.blueprint": ("make_blueprint",),
    "pipeloom.tracer.capture": ("capture",),
    "pipeloom.tracer.evaluation": ("capture_evaluation",),
    "pipeloom.tracer.handover": ("hand_over", "take_over"),
    "pipeloom.train.rank_processes": ("get_ready",),
}
"""Functions and methods by module; "" is importing it."""

NOTES = """import functools, importlib.machinery, json, os, sys, time
FILE, PHASES = @FILE@, @PHASES@
RANK = os.environ.get("RANK", "launcher")

def note(phase, start, cpu):
    took = dict(s=time.time() - start, cpu_s=time.process_time() - cpu)
    line = dict(process=RANK, phase=phase, start=start, **took)
    with open(FILE, "a") as file:
        file.write(json.dumps(line) + "\\n")

def noted(function, phase):
    @functools.wraps(function)
    def call(*args, **kwargs):
        start, cpu = time.time(), time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            note(phase, start, cpu)
    return call

real = importlib.machinery.SourceFileLoader.exec_module

def exec_module(self, module):
    phases = PHASES.get(module.__name__)
    if phases is None:
        return real(self, module)
    start, cpu = time.time(), time.process_time()
    real(self, module)
    for name in phases:
        if not name:
            note("import " + module.__name__, start, cpu)
            continue
        *owner, name = name.split(".")
        home = getattr(module, owner[0]) if owner else module
        setattr(home, name, noted(getattr(home, name), ".".join((*owner, name))))

if RANK == "launcher" or RANK.isdigit():
    importlib.machinery.SourceFileLoader.exec_module = exec_module
"""
"""A `sitecustomize` module, which every process of the command imports first."""

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


def one_run(folder: Path, cache: str) -> dict[str, Any]:
    """Run a command, print what each process did, and say how long it took until the first step."""
    (folder / "gpt2_small.py").write_text(MODEL)
    notes_code = NOTES.replace("@FILE@", repr(str(folder / "notes"))).replace("@PHASES@", repr(PHASES))
    (folder / "sitecustomize.py").write_text(notes_code)
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    # Byte code is kept, as that of an installed package is.
    env = {"PYTHONPATH": path, "XDG_CACHE_HOME": cache, "PYTHONDONTWRITEBYTECODE": ""}
    load, before, start = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    run_python("-m", "pipeloom", *COMMAND.split(), "--json", cwd=folder, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    for row in sorted(notes, key=lambda note: (note["process"], note["start"])):
        if row["s"] >= 0.05 or row["cpu_s"] >= 0.05:
            begin = row["start"] - start
            took = f"{row['s']:6.2f} s, processor {row['cpu_s']:6.2f} s"
            print(f"{row['process']:>8} at {begin:6.2f} s for {took}  {row['phase']}")
    own = [note for note in notes if note["process"] == "0"]
    compared_until = max((n["start"] + n["s"] for n in own if n["phase"] == "verify_once"), default=0.0)
    steps = [note for note in own if note["phase"] == "FlushedRun.feed" and note["start"] > compared_until]
    return {
        "load": load,
        "first_step_after_s": min(note["start"] for note in steps) - start,
        "step_s": steps[0]["s"],
        "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def first_step(runs: int, cache: str) -> bool:
    rows = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="pipeloom-startup-") as folder:
            rows.append(one_run(Path(folder), cache))
    print_table(rows, "train")
    middle = median(row["first_step_after_s"] for row in rows)
    print(f"the first step after {middle:.1f} s, the middle of the runs")
    return middle <= LIMIT_S


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
            "train": partial(first_step, given.runs, cache),
            "first-plan": partial(first_plan, given.layers, given.devices, given.planner),
        }
        return run_parts(given.parts, parts)


if __name__ == "__main__":
    sys.exit(main())
