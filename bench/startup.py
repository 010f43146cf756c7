"""From the command to the first step: GPT-2 small in two ranks of one thread each, and what that time holds.

    python bench/startup.py [--runs 3] [--only train]

`pipeloom train` as often as asked for: the first time in an empty cache folder, so that the model is compared
with plain PyTorch and the contention of ranks is measured, then again as everybody's second run; and
`pipeloom bench --steps 1 --warmup 0`, which is to run one step. Every process notes when it enters and leaves
some functions: seconds by the clock, and of the processor by that process. What is within another phase is
counted there, too. The model is Hugging Face's GPT-2 with 124M parameters and random weights, 8 micro-batches
of 2 rows of 128 tokens. It wants two quiet cores: the load is in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import print_stamp, print_table

LIMIT_S = 20.0
JOB = """import torch
from pipeloom import Job
from transformers import GPT2Config, GPT2LMHeadModel


def job():
    config = GPT2Config(use_cache=False)

    def batch(seed, size):
        ids = torch.randint(config.vocab_size, (size, 128), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    return Job(name="gpt2-small", model=lambda: GPT2LMHeadModel(config), batch=batch)
"""
SHAPE = {"microbatches": 8, "microbatch_size": 2}
COMMANDS = {
    "train": [
        *("train", "--job", "gpt2_small.py:job", "--steps", "1", "--out", "run"),
        *(word for key, value in SHAPE.items() for word in ("--set", f"pipeline.{key}={value}")),
        *("--set", "validation_batches=1"),
    ],
    "bench": [
        "bench",
        "gpt2_small.py:job",
        "-m",
        "8",
        "--microbatch-size",
        "2",
        "--steps",
        "1",
        "--warmup",
        "0",
    ],
}
PHASES = {
    "torch": ("",),
    "transformers.models.gpt2.modeling_gpt2": ("",),
    "pipeloom.pipeline": (
        "",
        "Pipeline._build",
        "Pipeline.predict",
        "Pipeline.step",
        "Pipeline.evaluate",
    ),
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


def notes_code(file: Path) -> str:
    """A `sitecustomize` module, which every process of the command imports first."""
    return NOTES.replace("@FILE@", repr(str(file))).replace("@PHASES@", repr(PHASES))


class RunFailed(Exception):
    """A command ended with another status than 0."""


def one_run(name: str, folder: Path, cache: Path) -> dict[str, Any]:
    """Run a command; seconds until the first step, of the processor for all, and the phases of each process.

    Raises: RunFailed with everything that it printed.
    """
    (folder / "gpt2_small.py").write_text(JOB)
    (folder / "sitecustomize.py").write_text(notes_code(folder / "notes"))
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}
    env["PYTHONDONTWRITEBYTECODE"] = ""  # byte code is kept, as that of an installed package is
    command = [sys.executable, "-m", "pipeloom", *COMMANDS[name], "--json"]
    load, before, start = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    own = [note for note in notes if note["process"] == "0"]
    compared_until = max((n["start"] + n["s"] for n in own if n["phase"] == "verify_once"), default=0.0)
    steps = [note for note in own if note["phase"] == "Pipeline.step" and note["start"] > compared_until]
    return {
        "command": name,
        "load": round(load, 2),
        "first_step_after_s": round(min(note["start"] for note in steps) - start, 2),
        "steps": len(steps),
        "step_s": round(steps[0]["s"], 2),
        "processor_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "said": [
            line for line in done.stderr.splitlines() if "compared" in line or "planned to take" in line
        ],
        "phases": phases(notes, start),
    }


def phases(notes: list[dict[str, Any]], start: float) -> list[str]:
    """What each process did, in order, as text: when it began, how long it took, processor seconds."""
    rows = sorted(notes, key=lambda note: (note["process"] != "launcher", note["process"], note["start"]))
    return [
        f"{row['process']:>8} at {row['start'] - start:6.2f} s for {row['s']:6.2f} s, processor "
        f"{row['cpu_s']:6.2f} s  {row['phase']}"
        for row in rows
        if row["s"] >= 0.05 or row["cpu_s"] >= 0.05
    ]


def main(runs: int, names: list[str]) -> int:
    rows: list[dict[str, Any]] = []
    print_stamp()
    with tempfile.TemporaryDirectory(prefix="pipeloom-startup-") as cache:
        for number in range(runs):
            for name in names:
                with tempfile.TemporaryDirectory(prefix="pipeloom-startup-") as folder:
                    row = one_run(name, Path(folder), Path(cache)) | {"first": not number}
                print("\n".join(row.pop("phases")), flush=True)
                rows.append(row)
    print_table(rows)
    middle = {
        name: statistics.median(row["first_step_after_s"] for row in rows if row["command"] == name)
        for name in names
    }
    print_table([middle], "Middle of the runs, seconds to the first step")
    return 0 if max(middle.values()) <= LIMIT_S else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=tuple(COMMANDS), action="append")
    options = parser.parse_args()
    try:
        sys.exit(main(options.runs, options.only or list(COMMANDS)))
    except RunFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(2)
