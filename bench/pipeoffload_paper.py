"""The models of PipeOffload (arXiv 2503.01328) simulated on its machine, beside what it published.

A layer of b sequences of s tokens and width h, with g = key-value heads / heads, takes 2 b s h^2 (10 + 2 g)
operations in the matmuls of each of F, I and W, and 4 b s^2 h for attention in F, twice that in I. It keeps
20 b s h bytes of half precision, as the paper's appendix C counts, less 4 b s h (1 - g) that grouped
queries save; that is ours, and gives the paper's gigabytes. The first stage has one layer less and the
embedding, the last one less and the head. Assumed, as the paper does not say it: a vocabulary of 50304 and
micro-batches of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from machine import print_table

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.costs import StageCost
from pipeloom.lowering.passes import lower
from pipeloom.planner.offload_ratio import transformer_ratio
from pipeloom.schedules import registry
from pipeloom.schedules.language import uplinks
from pipeloom.simulator.simulate import simulate

VOCABULARY = 50304
RING_BYTES_PER_S = 230e9
"""Of all-reduces among eight devices of a node; an assumption."""

SCHEDULES = ("interleaved_1f1b", "gis", "gis_h", "po_h", "po_f", "1f1b")
CONTEXTS = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}


class Model(NamedTuple):
    """layers: with that which the first stage and that which the last stage lacks.  batch: sequences."""

    layers: int
    heads: int
    hidden: int
    batch: int
    ranks: int


MODELS = {
    "10.5B": Model(40, 40, 5120, 64, 8),
    "18.1B": Model(48, 48, 6144, 128, 16),
    "42.9B": Model(64, 64, 8192, 256, 32),
    "66.6B": Model(64, 80, 10240, 256, 32),
    "83.8B": Model(80, 80, 10240, 256, 32),
}

X = None
PUBLISHED: dict[tuple[str, str], tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    ("10.5B", "4k"): ((65, 65, 63, 59, X, 57), (15, 13, 8, 3, X, 12)),
    ("10.5B", "8k"): ((68, 68, 65, 61, X, 59), (30, 27, 16, 6, X, 24)),
    ("10.5B", "16k"): ((X, X, 68, 63, 59, 62), (X, X, 32, 12, 9, 48)),
    ("10.5B", "32k"): ((X, X, X, 65, 64, X), (X, X, X, 24, 14, X)),
    ("18.1B", "4k"): ((64, 65, 63, 59, X, 56), (24, 19, 13, 4, X, 18)),
    ("18.1B", "8k"): ((66, 67, 66, 62, X, 58), (49, 38, 25, 8, X, 37)),
    ("18.1B", "16k"): ((X, X, 59, 64, 61, X), (X, X, 51, 15, 9, X)),
    ("18.1B", "32k"): ((X, X, X, 65, 65, X), (X, X, X, 27, 15, X)),
    ("42.9B", "4k"): ((63, 65, 64, 62, 58, 55), (49, 34, 25, 10, 5, 33)),
    ("42.9B", "8k"): ((X, X, 62, 63, 60, X), (X, X, 51, 20, 8, X)),
    ("42.9B", "16k"): ((X, X, X, 63, 65, X), (X, X, X, 41, 12, X)),
}
"""Its figure 15: MFU in percent and gigabytes of activations, in the order of `SCHEDULES`; None where it has
none (out of memory, or not run)."""

TENSOR = (("42.9B", "16k"), ("66.6B", "16k"), ("83.8B", "8k"))
"""Where pipelines alone were 12 to 19 % faster than eight-way tensor parallelism with four stages."""

THEORY = {
    4096: (1.70, 1.46, 1.15, 0.80),
    5120: (1.40, 1.23, 1.00, 0.72),
    6144: (1.19, 1.07, 0.88, 0.66),
    7168: (1.03, 0.94, 0.80, 0.61),
    8192: (0.92, 0.84, 0.72, 0.56),
    10240: (0.74, 0.69, 0.61, 0.49),
}
"""Its figure 1: k on A100 by hidden size, for the contexts in order."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """flops_per_s: achieved in matmuls.  attention_flops_per_s: in attention.  peak_flops_per_s: of which MFU
    is a share.  host_bytes_per_s: of a pair of devices together, in each direction; None for the
    built-in figures.  name: of the device."""

    name: str
    flops_per_s: float
    attention_flops_per_s: float
    peak_flops_per_s: float
    host_bytes_per_s: float | None = None

    def cluster(self, ranks: int, each: int) -> Cluster:
        """each: ranks of a node."""
        nodes, each = max(1, ranks // each), min(each, ranks)
        found = find_cluster(f"{nodes} nodes of {each} x {self.name}")
        if self.host_bytes_per_s is None:
            return found
        link = Link(bandwidth_bytes_per_s=self.host_bytes_per_s)
        devices = tuple(replace(one, host_link=link, host_link_back=link) for one in found.devices)
        return replace(found, devices=devices, switches=dict.fromkeys(found.switches, link))


def built_in_machine(name: str) -> Machine:
    device = find_cluster(name).devices[0]
    peak = device.flops_per_s["bfloat16"]
    return Machine(
        name=name,
        flops_per_s=device.efficiency["matmul"] * peak,
        attention_flops_per_s=device.efficiency["attention"] * peak,
        peak_flops_per_s=peak,
    )


MACHINES = {
    "the paper's A100": Machine(
        name="a100-80",
        flops_per_s=220e12,
        attention_flops_per_s=220e12,
        peak_flops_per_s=312e12,
        host_bytes_per_s=15e9,
    ),
    "A100": built_in_machine("a100-80"),
    "H200": built_in_machine("h200"),
}


def operations(model: Model, context: int) -> tuple[float, float, float]:
    """Of the matmuls of a layer in each of F, I and W; of its attention in F; of the head in each."""
    groups = 8 / model.heads
    tokens = float(context)
    matmuls = 2 * tokens * model.hidden**2 * (10 + 2 * groups)
    return matmuls, 4 * tokens * context * model.hidden, 2 * tokens * model.hidden * VOCABULARY


def kept_bytes(model: Model, context: int) -> int:
    """Of a layer's residuals."""
    return int((20 - 4 * (1 - 8 / model.heads)) * context * model.hidden)


def layers_of(model: Model, ranks: int, chunks: int) -> list[int]:
    """Of each stage: as many on each rank as can be, the odd ones on its first stages."""
    found = [0] * (ranks * chunks)
    for rank in range(ranks):
        own = (rank + 1) * model.layers // ranks - rank * model.layers // ranks
        for chunk in range(chunks):
            found[chunk * ranks + rank] = own // chunks + int(chunk < own % chunks)
    found[0] -= 1
    found[-1] -= 1
    return found


def stage_costs(
    model: Model, context: int, each: list[int], machine: Machine, link: float, *, ways: int = 1
) -> tuple[StageCost, ...]:
    """each: layers of each stage.  ways: of tensor parallelism: compute and bytes are shared, and two
    all-reduces of the output of a layer stand in F and two in I."""
    matmuls, attention, head = operations(model, context)
    ring_s = 2 * 2 * context * model.hidden * 2 * (ways - 1) / ways / RING_BYTES_PER_S
    found = []
    for stage, layers in enumerate(each):
        last = head if stage == len(each) - 1 else 0.0
        rate = machine.flops_per_s * ways
        weight_s = (layers * matmuls + last) / rate
        attention_s = attention / (machine.attention_flops_per_s * ways)
        input_s = weight_s + layers * (2 * attention_s + ring_s)
        size = layers * kept_bytes(model, context) // ways
        found.append(
            StageCost(
                forward_s=weight_s + layers * (attention_s + ring_s),
                backward_s=input_s + weight_s,
                input_grad_s=input_s,
                weight_grad_s=weight_s,
                residual_bytes=size,
                carried_bytes=size,
                offloaded_bytes=size,
                offload_s=size / link,
                reload_s=size / link,
            )
        )
    return tuple(found)


def simulated(
    model: Model, context: int, name: str, machine: Machine, *, ways: int = 1
) -> tuple[float, float]:
    """MFU in percent, and the most GiB of residuals of a rank."""
    ranks = model.ranks // ways
    chunks = 1 if name == "1f1b" else max(1, model.layers // ranks)
    stages, placement = registry.default_placement(name, ranks, chunks)
    cluster = machine.cluster(ranks, 8 // ways)
    out = cluster.devices[0].host_link
    assert out is not None
    each = layers_of(model, ranks, chunks)
    costs = stage_costs(model, context, each, machine, out.bandwidth_bytes_per_s, ways=ways)
    message = 2 * context * model.hidden // ways
    sized = (replace(each, value=replace(each.value, shape=(message // 4,))) for each in stages.crossings)
    stages = replace(stages, crossings=tuple(sized))
    schedule = registry.build(
        name,
        stages,
        placement,
        model.batch,
        costs=costs,
        uplinks=uplinks.shared_uplinks(costs, ranks, 2),
        transfer_s=message / cluster.within_node.bandwidth_bytes_per_s,
    )
    timeline = simulate(lower(schedule, stages), stages, costs, cluster)
    matmuls, attention, head = operations(model, context)
    whole = (model.layers - 2) * (3 * matmuls + 3 * attention) + 3 * head
    mfu = whole * model.batch / timeline.step_s / (model.ranks * machine.peak_flops_per_s)
    return 100 * mfu, max(peak.get("residuals", 0) for peak in timeline.peaks) / 2**30


def cells(name: str, length: str, machine: Machine) -> list[dict[str, Any]]:
    """A row of the paper's figure 15."""
    published = PUBLISHED.get((name, length), ((None,) * 6,) * 2)
    rows = []
    for schedule, mfu, gigabytes in zip(SCHEDULES, *published, strict=True):
        ours = simulated(MODELS[name], CONTEXTS[length], schedule, machine)
        rows.append(
            {"model": name, "context": length, "schedule": schedule, "mfu": ours[0], "gib": ours[1]}
            | {"paper_mfu": mfu, "paper_gb": gigabytes}
        )
    return rows


def against_tensor(machine: Machine) -> list[dict[str, Any]]:
    """Pipelines alone with `po_f`, over eight-way tensor parallelism with four interleaved stages."""
    rows = []
    for name, length in TENSOR:
        model, context = MODELS[name], CONTEXTS[length]
        alone = simulated(model, context, "po_f", machine)
        shared = simulated(model, context, "interleaved_1f1b", machine, ways=8)
        rows.append(
            {"model": name, "context": length, "gain_percent": 100 * (alone[0] / shared[0] - 1)}
            | {"po_f": alone, "tensor": shared, "paper_percent": "12 to 19"}
        )
    return rows


def ratios() -> list[dict[str, float]]:
    return [
        {"hidden": hidden, "context": context, "k": transformer_ratio(hidden, context), "paper": theirs}
        for hidden, row in THEORY.items()
        for context, theirs in zip(CONTEXTS.values(), row, strict=True)
    ]


def paper(quick: bool) -> list[dict[str, Any]]:
    asked = [*PUBLISHED, ("66.6B", "16k"), ("83.8B", "8k")]
    print_table(ratios(), "k of the paper's models")
    rows = []
    for label, machine in MACHINES.items():
        wanted = asked[:1] if quick else asked if label == next(iter(MACHINES)) else asked[-2:]
        rows += [{"machine": label} | row for name, length in wanted for row in cells(name, length, machine)]
        if not quick:
            print_table(against_tensor(machine), f"{label}: gain over tensor parallel pipelines")
    return rows
