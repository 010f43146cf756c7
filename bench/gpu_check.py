"""What only an accelerator can answer, in at most 10 minutes: of any type that PyTorch knows.

    make gpu-check                              the tests that need a GPU, then this
    python bench/gpu_check.py [numbers memory host speed]

numbers   float32 and bfloat16 train as plain PyTorch under `torch.autocast` does on the device
memory    peaks of the ledger against the allocator's, with residuals kept, recomputed and offloaded; what the
          allocator reserves beyond that; what recomputing and offloading cost; the scratch of an update
host      waits of the host in a step, and the host's time for a step of tiny ops against plain PyTorch
speed     the time of a step in float32 and bfloat16, against plain PyTorch's, the plan's (from data sheets)
          and what was predicted before the first one; its MFU

Each finding is a line: what was found, what was expected, and in words what differs. All of them go to a file
in bench/results/. Exit status 1 if one differs. The tests run all of it on the stand-in accelerator.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from statistics import median
from typing import Any

import host_time
import torch
from machine import FOLDER, describe_machine, parser_of, print_table, tokens
from model import Layer
from torch import Tensor, nn

import pipeloom
from pipeloom import Job, Options, Pipeline, Plan
from pipeloom.clusters.devices import built_in
from pipeloom.ir.errors import ConfigError, PipeloomError
from pipeloom.run_options import named_device
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.job_calls import call_model, make_optimizer, scalar_loss

MICROBATCHES, STEPS = 8, 3


@dataclass(frozen=True)
class Size:
    """Of the model. rows: per micro-batch."""

    layers: int
    width: int
    heads: int
    length: int
    rows: int


LARGE, SMALL = Size(8, 1600, 25, 1024, 2), Size(2, 64, 2, 32, 2)
"""For accelerators, blocks of GPT-2 1.5B; for what computes on the CPU."""


@dataclass(frozen=True)
class Finding:
    """problem: what differs from what was expected, and what to look at; empty if nothing does."""

    what: str
    found: float | str
    expected: str
    problem: str = ""


class Blocks(nn.Module):
    """Its inputs are small: most of a step is not the way of a batch to the device."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(size.width, size.heads, 4 * size.width, causal=True) for _ in range(size.layers)
        )
        self.inlet, self.outlet = nn.Linear(8, size.width), nn.Linear(size.width, 8)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        hidden = self.inlet(given)
        for layer in self.layers:
            hidden = layer(hidden)
        return (self.outlet(hidden).float() - wanted).square().mean()


def job_of(size: Size) -> Job:
    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(seed)
        return {name: torch.randn(rows, size.length, 8, generator=dice) for name in ("given", "wanted")}

    return Job(model=lambda: Blocks(size), batch=batch, optimizer=sgd, name="blocks")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def gpt2(size: Size) -> Job:
    """GPT-2 with its heads for words, from a configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=size.layers, n_embd=size.width, n_head=size.heads, n_positions=size.length)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return Job(
        model=lambda: GPT2LMHeadModel(config),
        batch=tokens(config.vocab_size, size.length),
        optimizer=sgd,
        name="gpt2",
    )


@dataclass(frozen=True)
class Setup:
    device: str
    job: Job
    rows: int

    @cache  # noqa: B019  # one setup lives as long as the script
    def captured(self, autocast: torch.dtype | None) -> Captured:
        return pipeloom.capture(self.job, self.rows, autocast=autocast, device=self.device)

    def plan(self, autocast: torch.dtype | None = None, **changes: Any) -> Plan:
        how: dict[str, Any] = {"ranks": 1, "schedule": "gpipe", "microbatches": MICROBATCHES} | changes
        return pipeloom.plan(
            self.job,
            captured=self.captured(autocast),
            microbatch_size=self.rows,
            cluster=described_as(self.device),
            **how,
        )

    def batch(self, seed: int) -> dict[str, Tensor]:
        return self.job.batch(seed, MICROBATCHES * self.rows)

    @contextmanager
    def pipeline(self, plan: Plan, autocast: torch.dtype | None = None) -> Iterator[Pipeline]:
        options = Options(device=self.device, autocast=autocast, compare=False)
        with Pipeline(self.job, plan, options=options, captured=self.captured(autocast)) as pipeline:
            yield pipeline

    def plain(self, autocast: torch.dtype | None) -> Callable[[dict[str, Tensor]], float]:
        """A step of plain PyTorch on the device; it gives the loss."""
        torch.manual_seed(0)
        model = self.job.model().to(self.device)
        optimizer = make_optimizer(self.job.optimizer or torch.optim.AdamW, dict(model.named_parameters()))

        def step(batch: dict[str, Tensor]) -> float:
            parts = {n: t.to(self.device).split(self.rows) for n, t in batch.items()}
            optimizer.zero_grad()
            losses = []
            for values in zip(*parts.values(), strict=True):
                part = dict(zip(parts, values, strict=True))
                with torch.autocast(self.device, torch.bfloat16, enabled=autocast is not None):
                    loss = scalar_loss(self.job, call_model(self.job, model, part), part) / MICROBATCHES
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            return float(torch.stack(losses).double().sum())

        return step


def described_as(device: str) -> str:
    """The built-in device that this one is; an A100 for one that is not among them."""
    name = str(torch.get_device_module(device).get_device_name(0))
    try:
        return built_in(name).name
    except ConfigError:
        return "a100-80"


def numbers(setup: Setup) -> Iterator[Finding]:
    for autocast, limit in ((None, 1e-4), (torch.bfloat16, 1e-2)):
        name = "float32" if autocast is None else "bfloat16"
        step = setup.plain(autocast)
        expected = [step(setup.batch(seed)) for seed in range(STEPS)]
        with setup.pipeline(setup.plan(autocast), autocast) as pipeline:
            losses = [pipeline.step(setup.batch(seed)) for seed in range(STEPS)]
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        problem = f"losses {losses} against {expected}: compare the casts of both" if off > limit else ""
        yield Finding(f"{name}: losses against plain PyTorch", off, f"at most {limit:g}", problem)


@dataclass(frozen=True)
class Trained:
    """peak: what this pipeline takes of the device.  beyond: what the allocator reserves on top."""

    losses: list[float]
    ledger: int
    peak: int
    beyond: int
    step_s: float


def trained(setup: Setup, plan: Plan) -> Trained:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    with setup.pipeline(replace(plan, caps=())) as pipeline:
        losses = [pipeline.step(setup.batch(seed)) for seed in range(STEPS - 1)]
        pipeline.ledger.peak = pipeline.ledger.total
        torch.accelerator.reset_peak_memory_stats()
        losses.append(pipeline.step(setup.batch(STEPS - 1)))
        peak = torch.accelerator.max_memory_allocated()
        beyond = torch.accelerator.max_memory_reserved() - peak
        ledger = pipeline.ledger.peak
        return Trained(losses, ledger, peak - before, beyond, seconds_of(pipeline.step, setup.batch(0)))


def memory(setup: Setup) -> Iterator[Finding]:
    kept = setup.plan()
    cap = int(0.7 * kept.stages[0].memory.total)
    keep = trained(setup, kept)
    for way in ("keep", "recompute", "offload"):
        try:
            plan = kept if way == "keep" else setup.plan(memory=cap, treatments=way, planner="exact")
            found = keep if way == "keep" else trained(setup, plan)
        except PipeloomError as error:
            yield Finding(f"{way}: a run", "failed", "trains", str(error))
            continue
        off = found.ledger / found.peak - 1
        problem = f"the ledger has {found.ledger:,} bytes, the allocator {found.peak:,}"
        yield Finding(f"{way}: ledger over allocator", off, "within 3 %", problem if abs(off) > 0.03 else "")
        yield Finding(
            f"{way}: reserved beyond, MiB", found.beyond / 2**20, "whatever it is: it is in no plan"
        )
        if way == "keep":
            continue
        same = max(abs(a - b) / abs(b) for a, b in zip(found.losses, keep.losses, strict=True))
        problem = "treated residuals have other numbers" if same > 1e-5 else ""
        yield Finding(f"{way}: losses against keep", same, "at most 1e-05", problem)
        times, peaks = found.step_s / keep.step_s, found.peak / keep.peak
        planned = plan.predicted_step_s / kept.predicted_step_s
        shares = f"{times:.3f} of the time, {peaks:.3f} of the peak"
        yield Finding(f"{way}: against keep", shares, f"planned {planned:.3f} of the time")
    job = replace(setup.job, optimizer=None)
    with Pipeline(job, kept, options=Options(device=setup.device, compare=False)) as pipeline:
        pipeline.step(setup.batch(0))
        weights = pipeline.weights
        for name in weights.summed.sums:
            weights.summed.total(name)
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        weights.step()
        scratch = torch.accelerator.max_memory_allocated() - before
        most = weights.step_bytes + 0.03 * sum(weights.sizes.values())
        problem = f"the ledger counts {weights.step_bytes:,} bytes" if scratch > most else ""
        yield Finding("scratch of an update by the default optimizer, bytes", scratch, "0", problem)


def host(setup: Setup) -> Iterator[Finding]:
    with setup.pipeline(setup.plan()) as pipeline:
        for seed in range(2):
            pipeline.step(setup.batch(seed))
        waits = host_waits(setup.device, lambda: pipeline.step(setup.batch(2)))
    if waits is None:
        yield Finding("waits of the host in a step", "not counted", "1: only CUDA counts them")
    else:
        problem = "; ".join(waits) if len(waits) > 1 else ""
        yield Finding("waits of the host in a step", len(waits), "at most 1: it reads the losses", problem)
    row = host_time.measure(4, MICROBATCHES, 20, setup.device)
    ratio = row["step"]
    assert isinstance(ratio, float)
    problem = "profile it with py-spy" if ratio > 1.1 else ""
    yield Finding("host time of a step of tiny ops over plain PyTorch", ratio, "at most 1.1", problem)
    yield Finding("us an op", str(row["us an op"]), "whatever it is")


def host_waits(device: str, step: Callable[[], object]) -> list[str] | None:
    """Where the host waited for the device, as CUDA warns of it; None where nothing counts that."""
    if device != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


def speed(setup: Setup) -> Iterator[Finding]:
    for autocast in (None, torch.bfloat16):
        name = f"{setup.job.name}, {'float32' if autocast is None else 'bfloat16'}"
        batch, plan = setup.batch(0), setup.plan(autocast, schedule="1f1b")
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        step = setup.plain(autocast)
        plain_s, plain_peak = seconds_of(step, batch), torch.accelerator.max_memory_allocated()
        del step
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        with setup.pipeline(plan, autocast) as pipeline:
            predicted_s = pipeline.predict().step_s
            ours_s, peak = seconds_of(pipeline.step, batch), torch.accelerator.max_memory_allocated()
            mfu = None if pipeline.report is None else pipeline.report.mfu
        yield Finding(f"{name}: seconds of a step", ours_s, f"{plain_s:.5g} in plain PyTorch")
        ratio = ours_s / plain_s
        problem = "look at a trace of both" if ratio > 1.05 else ""
        yield Finding(f"{name}: time over plain PyTorch's", ratio, "at most 1.05", problem)
        yield Finding(f"{name}: peak over plain PyTorch's", peak / plain_peak, "whatever it is")
        off = predicted_s / ours_s - 1
        problem = f"predicted {predicted_s:.4f} s, measured {ours_s:.4f} s" if abs(off) > 0.1 else ""
        yield Finding(f"{name}: as predicted over as measured", off, "within 10 %", problem)
        planned = plan.predicted_step_s / ours_s - 1
        yield Finding(
            f"{name}: as planned over as measured",
            planned,
            f"whatever it is, for {described_as(setup.device)}",
        )
        yield Finding(f"{name}: MFU", "not known" if mfu is None else mfu, "whatever it is, below 1")


def seconds_of(step: Callable[[dict[str, Tensor]], object], batch: dict[str, Tensor]) -> float:
    """Of a step that ends with reading its loss, once warm."""
    taken = []
    for _ in range(STEPS + 4):
        begin = time.perf_counter()
        step(batch)
        torch.accelerator.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[2:])


PHASES = {each.__name__: each for each in (numbers, memory, host, speed)}


def described(device: str) -> dict[str, Any]:
    """The machine, its accelerators, and where there is one, the driver."""
    module = torch.get_device_module(device)
    names = [str(module.get_device_name(i)) for i in range(torch.accelerator.device_count())]
    found: dict[str, Any] = describe_machine() | {"devices": names, "cuda": torch.version.cuda}
    if device == "cuda" and torch.version.cuda is not None:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    return found | {"hip": torch.version.hip}


def check(setup: Setup, names: list[str]) -> list[Finding]:
    findings: list[Finding] = []
    for name in names:
        begin = time.perf_counter()
        made = list(PHASES[name](setup))
        print_table([asdict(finding) for finding in made], f"{name}: {time.perf_counter() - begin:.0f} s")
        findings += made
    return findings


def main() -> int:
    parser = parser_of(__doc__, PHASES)
    parser.add_argument("--small", action="store_true", help="a tiny model, for what computes on the CPU")
    arguments = parser.parse_args()
    if (device := named_device("auto")) == "cpu":
        print("gpu_check: this Python's torch sees no accelerator, so nothing was checked.", file=sys.stderr)
        return 1
    machine = described(device)
    print(*(f"{name} {value}" for name, value in machine.items()), sep=", ", flush=True)
    size = SMALL if arguments.small else LARGE
    findings = check(Setup(device, job_of(size), size.rows), arguments.parts)
    if "speed" in arguments.parts and find_spec("transformers"):
        language = replace(size, layers=12, width=768, heads=12) if size is LARGE else size
        findings += check(Setup(device, gpt2(language), 2 * size.rows), ["speed"])
    folder = FOLDER / "results"
    folder.mkdir(exist_ok=True)
    file = folder / f"gpu_check_{device}_{machine['date']}.json"
    file.write_text(json.dumps({"machine": machine, "findings": [asdict(f) for f in findings]}, indent=1))
    print(f"written to {file}")
    differ = [f"{finding.what} is {finding.found}, expected {finding.expected}: {finding.problem}"
              for finding in findings if finding.problem]  # fmt: skip
    print(*differ, sep="\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
