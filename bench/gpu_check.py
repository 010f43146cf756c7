"""One stage of GPT-2 1.5B on one GPU under memory policies, run, beside what the cost model predicts.

    make gpu-check                                   the tests that need a GPU, then this
    python bench/gpu_check.py
    python bench/gpu_check.py --device cpu           the same code on a tiny stage, residuals go to files

The stage: 12 of the 48 blocks of Hugging Face's GPT-2 with the published width of 1600, 25 heads and 1024
tokens, random weights, AdamW. It receives hidden states and the gradient of what it makes, as a stage in the
middle does; position embeddings stay in front of it, so that gradients flow to its very start, and the last
norm behind it. It runs as the first of as many stages of 1f1b as there are micro-batches in flight, in one
process, through the real Pipeline: no message is waited for.

Policies: everything kept; then recomputation, offloading and both under caps that are shares of the kept
peak, chosen by planner.memopt from a profile measured here on devices measured here. Where no choice keeps a
cap, the lowest that one keeps is taken, and the row says so. A step runs under the planned cap and 3 %.

Per policy: peaks of the ledger and of the allocator over the predicted one; times of F and of B, which
recomputes, by the measured profile and by roofline; gradients of the first step against the kept run's; and
the share of copying that hides behind compute, 1 - (step - kept step - recomputation by the profile) /
(copies to the host and back).

Exit status 1 if gradients differ by more than two kept runs do, or a run fails.
"""

from __future__ import annotations

import argparse
import gc
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe_machine, print_table
from torch import Tensor, nn

from pipeloom import Job, Options, Pipeline
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import PipeloomError
from pipeloom.ir.memory_policy import MemoryPolicy, Treatment
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.ir.stages import cut
from pipeloom.ir.timeline import Event, Timeline
from pipeloom.lowering.passes import lower
from pipeloom.machine import detect
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage
from pipeloom.planner.treatments.choose import BOTH, Evaluation, treat_interval
from pipeloom.planning import capture
from pipeloom.profiler.host_copies import file_tier, free_disk
from pipeloom.profiler.measure_ops import measure
from pipeloom.profiler.roofline import roofline
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate

WAYS: Mapping[str, tuple[Treatment, ...]] = {
    "recompute": ("recompute",),
    "offload": ("offload",),
    "both": BOTH,
}
TOLERANCE = 0.03
"""By which a peak may pass the predicted one."""

ROOM = 0.85
"""Share of the free memory that the kept run may take: libraries and their workspaces need some."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the stage and of a step. rows: per micro-batch."""

    layers: int
    width: int
    heads: int
    length: int
    rows: int
    in_flight: int = 4
    microbatches: int = 8


SIZES = {
    "cuda": Size(layers=12, width=1600, heads=25, length=1024, rows=4),
    "cpu": Size(layers=2, width=64, heads=2, length=64, rows=2),
}


class Blocks(nn.Module):
    """Some blocks of GPT-2. Shapes: rows, length, width."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(
            vocab_size=1,
            n_positions=size.length,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.body = GPT2Model(config)
        self.body.wte = nn.Identity()  # nobody reads tokens

    def forward(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        return (self.body(inputs_embeds=hidden).last_hidden_state * gradient).mean()


def job_of(size: Size) -> Job:
    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(seed)
        shape = (rows, size.length, size.width)
        return {name: torch.randn(shape, generator=dice) for name in ("hidden", "gradient")}

    # One parameter after the other, as the ledger counts the optimizer's scratch.
    return Job(
        model=lambda: Blocks(size),
        batch=batch,
        name=f"{size.layers} blocks of GPT-2",
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=False),
    )


@dataclass(frozen=True)
class Choice:
    """A policy of the stage. cap: bytes it was chosen for; asked: the cap as a share, None for none."""

    name: str
    asked: float | None
    cap: float
    treatments: Mapping[str, Treatment]

    @property
    def policy(self) -> MemoryPolicy:
        return MemoryPolicy(stages=(dict(self.treatments),)) if self.treatments else MemoryPolicy()


class Setup:
    """The stage captured at one size, its plan, and the cost models that predict it.

    cluster: one device.  budget_s: seconds to measure the ops' profile for.
    """

    def __init__(
        self,
        size: Size,
        device: str,
        autocast: torch.dtype | None,
        cluster: Cluster,
        *,
        budget_s: float = 6.0,
    ) -> None:
        self.size, self.device, self.autocast, self.cluster = size, device, autocast, cluster
        self.job = job_of(size)
        self.captured = capture(self.job, size.rows, autocast=autocast)
        graph = self.captured.graph
        self.stages = cut(graph, {op.name: 0 for op in graph.ops if not op.cheap})
        profiled = measure(self.captured, device, batch=self.job.batch(0, size.rows), budget_s=budget_s)
        self.models = {"profile": self._model(profiled), "roofline": self._model(self._estimate())}

    def _estimate(self) -> Profile:
        return roofline(self.captured.graph, self.cluster.devices[0])

    def _model(self, profile: Profile) -> CostModel:
        options = CostOptions(microbatches=self.size.microbatches)
        return CostModel(self.captured.graph, [profile], self.cluster, options)

    @cached_property
    def kept_bytes(self) -> float:
        return self._optimise(float("inf"), ()).peak_bytes

    def _optimise(self, cap: float, treatments: Sequence[Treatment]) -> Evaluation:
        model = self.models["profile"]
        return treat_interval(
            model, 0, len(model), 0, in_flight=self.size.in_flight, cap=cap, treatments=treatments
        )

    def choices(self, caps: Sequence[float]) -> Iterator[Choice]:
        """The policies to run; equal ones once."""
        yield Choice("keep", None, self.kept_bytes, {})
        for name, treatments in WAYS.items():
            seen: list[Mapping[str, Treatment]] = []
            for share in caps:
                cap = share * self.kept_bytes
                found = self._optimise(cap, treatments)
                if not found.fits:
                    least = found.peak_bytes
                    cap = least + 0.01 * (self.kept_bytes - least)
                    found = self._optimise(cap, treatments)
                if found.fits and found.treatments not in ({}, *seen):
                    seen.append(found.treatments)
                    yield Choice(name, share, cap, found.treatments)

    def plan(self, choice: Choice) -> Plan:
        q, count = self.size.in_flight, self.size.microbatches
        order = [f"0F{m}" for m in range(q)]
        for m in range(count):
            order += [f"0B{m}", *([f"0F{m + q}"] if m + q < count else [])]
        graph = self.captured.graph
        plan = Plan(
            graph=graph.fingerprint,
            planner="memopt",
            placement=(0,),
            schedule=f"first of {q} stages",
            stages=(estimate_stage(self.models["profile"], self.stages, 0, choice.treatments).plan(q),),
            schedule_rows=(" ".join(order),),
            microbatches=count,
            microbatch_size=self.size.rows,
            caps=(int(choice.cap * (1 + TOLERANCE)),),
            memory=choice.policy,
        )
        assert registry.in_flight(plan.as_schedule) == (q,)
        return plan

    def predicted(self, plan: Plan, by: str) -> Timeline:
        model, given = self.models[by], plan.memory.stages
        estimate = estimate_stage(model, self.stages, 0, given[0] if given else {})
        costs = (estimate.simulator_cost(estimate.plan(self.size.in_flight)),)
        program = lower(plan.as_schedule, self.stages, policy=plan.memory)
        return simulate(program, self.stages, costs, self.cluster)


def fitting(size: Size, device: str, autocast: torch.dtype | None, cluster: Cluster) -> Setup:
    """With as many rows per micro-batch as the kept run has room for, halved from `size.rows`."""
    setup = Setup(size, device, autocast, cluster)
    while setup.kept_bytes > ROOM * cluster.devices[0].memory_bytes and setup.size.rows > 1:
        setup = Setup(replace(setup.size, rows=setup.size.rows // 2), device, autocast, cluster)
    return setup


# --- runs and what they say ---------------------------------------------------------------------------

CAPS = (0.7, 0.5, 0.4)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a policy took. Sizes in bytes, times in seconds, None where the device cannot tell.

    allocator_bytes: the most that the allocator could not give to anybody else, which counts memory that a
    copy to the host still reads; tensors_bytes: without that.  pinned_bytes: of host memory, in the end.
    """

    ledger_bytes: int
    host_bytes: int
    step_s: float
    timeline: Timeline
    gradients: Mapping[str, Tensor]
    allocator_bytes: int | None = None
    tensors_bytes: int | None = None
    reserved_bytes: int | None = None
    pinned_bytes: int | None = None


def run(setup: Setup, plan: Plan, steps: int, directory: Path) -> Run:
    """Train a few steps; the first one gives the gradients, the middle one of the rest the times."""
    cuda, size = setup.device == "cuda", setup.size
    gc.collect()  # a pipeline's parts refer to each other
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    options = Options(
        device=setup.device, autocast=setup.autocast, keep_gradients=True, offload_dir=directory
    )
    with Pipeline(setup.job, plan, options=options) as pipeline:
        batch = setup.job.batch(1, size.rows * size.microbatches)
        pipeline.step(batch)
        weights = pipeline.weights
        gradients = {name: grad.cpu() for name, grad in weights.last_gradients.items()}
        weights.keep_gradients, weights.last_gradients = False, {}
        pipeline.step(batch)
        pipeline.ledger.restart_peak()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        timelines = []
        for _ in range(steps):
            pipeline.step(batch)
            timelines.append(pipeline.measured())
        middle = sorted(timelines, key=lambda t: t.step_s)[len(timelines) // 2]
        found = Run(
            ledger_bytes=pipeline.ledger.peak,
            host_bytes=pipeline.ledger.host_peak,
            step_s=middle.step_s,
            timeline=middle,
            gradients=gradients,
        )
        if cuda:
            stats = torch.cuda.memory_stats()
            found = replace(
                found,
                allocator_bytes=stats["active_bytes.all.peak"] - before,
                tensors_bytes=torch.cuda.max_memory_allocated() - before,
                reserved_bytes=torch.cuda.max_memory_reserved(),
                pinned_bytes=getattr(pipeline.tier, "pinned_bytes", 0),
            )
    return found


def kind(event: Event) -> str:
    """What an event is: "F", "B", "d2h", "h2d", "wait" for a copy, or anything else."""
    name = re.sub(r"\d+", "", event.action)
    if event.stream == "recv":
        return "wait" if name in ("OFFLOAD", "RELOAD") else ""
    return name if event.stream == "compute" else event.stream


def total_s(timeline: Timeline, *kinds: str) -> float:
    return sum(event.duration_s for event in timeline.events if kind(event) in kinds)


def action_times(timeline: Timeline) -> dict[str, float]:
    """Median seconds of one F, B and copy each way."""
    spans: dict[str, list[float]] = defaultdict(list)
    for event in timeline.events:
        spans[kind(event)].append(event.duration_s)
    return {name: median(spans[name]) for name in ("F", "B", "d2h", "h2d") if name in spans}


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest, over parameters, of the distance relative to the gradient's norm."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - grad).norm() / grad.norm().clamp_min(torch.finfo(grad.dtype).tiny))
        for n, grad in expected.items()
    )


def row_of(setup: Setup, choice: Choice, plan: Plan, found: Run, kept: Run) -> dict[str, Any]:
    """One line of the table and of the file."""
    by_profile, by_roofline = (setup.predicted(plan, by) for by in ("profile", "roofline"))
    expected = plan.stages[0].memory.total
    copies_s = total_s(found.timeline, "d2h", "h2d")
    exposed_s = found.step_s - kept.step_s - plan.microbatches * plan.stages[0].recompute_s
    given = list(choice.treatments.values())
    return {
        "policy": choice.name,
        "cap_share_asked": choice.asked,
        "cap_share": choice.cap / setup.kept_bytes,
        "cap_bytes": int(choice.cap),
        "recomputed": given.count("recompute"),
        "offloaded": given.count("offload"),
        "peak_bytes": {
            "model": expected,
            "simulated": by_profile.peak_bytes(0),
            "ledger": found.ledger_bytes,
            "allocator": found.allocator_bytes,
            "tensors": found.tensors_bytes,
            "reserved": found.reserved_bytes,
        },
        "model_over_ledger": expected / found.ledger_bytes,
        "model_over_allocator": expected / found.allocator_bytes if found.allocator_bytes else None,
        "host_bytes": {
            "simulated": by_profile.peak_bytes(0, "host"),
            "ledger": found.host_bytes,
            "pinned": found.pinned_bytes,
        },
        "action_s": {
            "measured": action_times(found.timeline),
            "profile": action_times(by_profile),
            "roofline": action_times(by_roofline),
        },
        "step_s": {
            "measured": found.step_s,
            "profile": by_profile.step_s,
            "roofline": by_roofline.step_s,
            "kept": kept.step_s,
        },
        "copies_s": copies_s,
        "waited_for_copies_s": total_s(found.timeline, "wait"),
        "hidden": 1 - exposed_s / copies_s if copies_s else None,
        "gradient_difference": difference(found.gradients, kept.gradients),
    }


def compare(setup: Setup, caps: Sequence[float], steps: int, directory: Path) -> Iterator[dict[str, Any]]:
    """A row per policy, the kept run first and again last; one that fails has its error instead."""
    kept: Run | None = None
    choices = list(setup.choices(caps))
    for choice in (*choices, replace(choices[0], name="keep again")):
        plan = setup.plan(choice)
        try:
            found = run(setup, plan, steps, directory)
        except (PipeloomError, torch.OutOfMemoryError) as error:
            yield {"policy": choice.name, "cap_share_asked": choice.asked, "failed": str(error)}
            if kept is None:
                return
            continue
        kept = kept or found
        yield row_of(setup, choice, plan, found, kept)


def judged(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong, in sentences. Kernels that add in any order (attention's backward on CUDA) make two kept
    runs differ; others may differ by some times as much, as the norm of a sum of such differences does."""
    wrong = [
        f"{row['policy']} at {row['cap_share_asked']} failed: {row['failed']}"
        for row in rows
        if "failed" in row
    ]
    again = [row for row in rows if row["policy"] == "keep again" and "failed" not in row]
    limit = max(1e-6, 10 * again[0]["gradient_difference"]) if again else 1e-6
    return wrong + [
        f"gradients with {row['policy']} at {row['cap_share']:.2f} of the kept peak differ by "
        f"{row['gradient_difference']:.1e} of their norm, more than {limit:.1e}"
        for row in rows
        if row.get("gradient_difference", 0.0) > limit
    ]


def _tell(what: str) -> None:
    print(f"measuring {what}", flush=True)


def device_of(device: str, cluster: str | None, directory: Path) -> Cluster:
    """One device with a link to the host: measured, or named and, for files, the link measured."""
    if cluster is None:
        given = directory if device == "cpu" else None
        return detect(device, devices=1, directory=given, progress=_tell).cluster
    found = find_cluster(cluster)
    one = found.devices[0]
    if one.host_link is None:
        out, back, _ = file_tier(directory)
        room = free_disk(directory)
        one = replace(one, host_link=out, host_link_back=back, host_memory_bytes=room)
    return replace(found, devices=(one,))


def card(device: str) -> dict[str, Any]:
    """The processor, and on CUDA the card with its driver."""
    found = describe_machine()
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = "unknown: nvidia-smi is not there"
        if shutil.which(asked[0]):
            driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
        found |= {
            "card": torch.cuda.get_device_name(),
            "driver": driver,
            "cuda": torch.version.cuda,
            "capability": torch.cuda.get_device_capability(),
        }
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda")
    parser.add_argument("--cluster", help="figures of the device by name or file, instead of measuring it")
    parser.add_argument("--dtypes", nargs="*", choices=["float32", "bfloat16"], help="bfloat16: autocast")
    parser.add_argument("--caps", nargs="*", type=float, default=list(CAPS), help="shares of the kept peak")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per policy")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, help="per micro-batch; halved until the kept run fits")
    parser.add_argument("--directory", type=Path, help="for offloaded residuals of the CPU")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: this Python's torch sees no CUDA device, so nothing was checked.", file=sys.stderr)
        return 1
    if find_spec("transformers") is None:
        print("gpu_check: the stage is from transformers, which this Python lacks.", file=sys.stderr)
        return 1
    own = SIZES[options.device]
    size = replace(own, layers=options.layers or own.layers, rows=options.rows or own.rows)
    directory = options.directory or Path(tempfile.gettempdir())
    cluster = device_of(options.device, options.cluster, directory)
    print(*(f"{name} {value}" for name, value in card(options.device).items()), sep=", ")
    print(cluster.devices[0], flush=True)
    wrong = []
    for dtype in options.dtypes or (["float32"] if options.device == "cpu" else ["float32", "bfloat16"]):
        autocast = None if dtype == "float32" else getattr(torch, dtype)
        setup = fitting(size, options.device, autocast, cluster)
        rows = list(compare(setup, options.caps, options.steps, directory))
        print_table(rows, f"{dtype}: times in seconds, sizes in bytes")
        print(setup.size)
        wrong += [f"{dtype}: {what}" for what in judged(rows)]
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
