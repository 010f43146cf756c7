"""One stage of GPT-2 1.5B on one GPU under memory policies, run, beside what the cost model predicts.

    make gpu-check                                   the tests that need a GPU, then this
    python bench/gpu_check.py                        writes bench/results/gpu_check.json
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
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_stage import SIZES, Choice, Setup, fitting
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pipeloom import Options, Pipeline
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster
from pipeloom.ir.errors import PipeloomError
from pipeloom.ir.plan import Plan
from pipeloom.ir.timeline import Event, Timeline
from pipeloom.ir.units import format_bytes
from pipeloom.machine import detect
from pipeloom.profiler.host_copies import file_tier, free_disk

RESULTS = Path(__file__).parent / "results" / "gpu_check.json"
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


def show(dtype: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(
        "policy",
        "cap",
        "ledger",
        "model/\nledger",
        "model/\nallocator",
        "F ms",
        "B ms",
        "step ms",
        "hidden",
        "gradients\ndiffer by",
        title=f"{dtype}; times: measured / predicted",
    )

    def number(value: float | None, text: str = "{:.3f}") -> str:
        return "-" if value is None else text.format(value)

    for row in rows:
        if "failed" in row:
            table.add_row(row["policy"], number(row["cap_share_asked"]), row["failed"].splitlines()[0])
            continue
        took, guess = row["action_s"]["measured"], row["action_s"]["profile"]
        times = [
            f"{1e3 * took[k]:.2f} / {1e3 * guess.get(k, 0.0):.2f}" if k in took else "-" for k in ("F", "B")
        ]
        table.add_row(
            row["policy"],
            number(row["cap_share"], "{:.2f}"),
            format_bytes(row["peak_bytes"]["ledger"]),
            number(row["model_over_ledger"]),
            number(row["model_over_allocator"]),
            *times,
            f"{1e3 * row['step_s']['measured']:.1f} / {1e3 * row['step_s']['profile']:.1f}",
            number(row["hidden"], "{:.2f}"),
            number(row["gradient_difference"], "{:.0e}"),
        )
    Console(width=140).print(table)


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
    parser.add_argument("--output", type=Path, help=f"by default {RESULTS.name} on CUDA, nothing on the CPU")
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
    result: dict[str, Any] = {"machine": card(options.device), "device": asdict(cluster.devices[0])}
    wrong = []
    for dtype in options.dtypes or (["float32"] if options.device == "cpu" else ["float32", "bfloat16"]):
        autocast = None if dtype == "float32" else getattr(torch, dtype)
        setup = fitting(size, options.device, autocast, cluster)
        rows = list(compare(setup, options.caps, options.steps, directory))
        show(dtype, rows)
        result[dtype] = {"size": asdict(setup.size), "rows": rows}
        wrong += [f"{dtype}: {what}" for what in judged(rows)]
        output = options.output or (RESULTS if options.device == "cuda" else None)
        if output is not None:
            output.write_text(json.dumps(result | {"wrong": wrong}, indent=1) + "\n")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
