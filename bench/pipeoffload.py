"""PipeOffload (arXiv 2503.01328): what offloading inside the schedule frees, and what it costs.

    python bench/pipeoffload.py paper paced

paper       the paper's models on its machine, beside what it published. A layer of b sequences of s tokens
            and width h, with g = key-value heads / heads, takes 2 b s h^2 (10 + 2 g) operations in the
            matmuls of each of F, I and W, and 4 b s^2 h for attention in F, twice that in I. It keeps
            20 b s h bytes of half precision (appendix C), less 4 b s h (1 - g) that grouped queries save;
            that is ours, and gives the paper's gigabytes. The first stage has one layer less and the
            embedding, the last one less and the head. Assumed: a vocabulary of 50304, micro-batches of one
            sequence. tests/planner has its table of k.
paced       ranks whose stages and copies sleep: the step beside the simulated one, k = 0.5 and 1.0
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from machine import changed, parser_of, run_parts
from pacing import pace

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.costs import StageCost
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.language import uplinks
from pipeloom.simulator.simulate import simulate

VOCABULARY = 50304

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

FLOPS, PEAK_FLOPS, HOST_BYTES_PER_S = 220e12, 312e12, 15e9
"""Of its A100 per second: achieved, and of which MFU is a share; and of a pair's link to the host."""


def machines(ranks: int) -> Cluster:
    found = find_cluster(f"{ranks // 8} nodes of 8 x a100-80")
    link = Link(bandwidth_bytes_per_s=HOST_BYTES_PER_S)
    found = changed(found, host_link=link, host_link_back=link)
    return replace(found, switches=dict.fromkeys(found.switches, link))


def operations(model: Model, context: int) -> tuple[float, float, float]:
    """Of the matmuls of a layer in each of F, I and W; of its attention in F; of the head in each."""
    words = float(context)
    matmuls = 2 * words * model.hidden**2 * (10 + 2 * 8 / model.heads)
    return matmuls, 4 * words * context * model.hidden, 2 * words * model.hidden * VOCABULARY


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


def stage_costs(model: Model, context: int, each: Sequence[int]) -> tuple[StageCost, ...]:
    """each: layers of each stage."""
    matmuls, attention, head = operations(model, context)
    kept_bytes = int((20 - 4 * (1 - 8 / model.heads)) * context * model.hidden)
    found = []
    for stage, layers in enumerate(each):
        last = head if stage == len(each) - 1 else 0.0
        weight_s = (layers * matmuls + last) / FLOPS
        attention_s = attention / FLOPS
        input_s = weight_s + layers * 2 * attention_s
        size = layers * kept_bytes
        found.append(
            StageCost(
                forward_s=weight_s + layers * attention_s,
                backward_s=input_s + weight_s,
                input_grad_s=input_s,
                weight_grad_s=weight_s,
                residual_bytes=size,
                carried_bytes=size,
                offloaded_bytes=size,
                offload_s=size / HOST_BYTES_PER_S,
                reload_s=size / HOST_BYTES_PER_S,
            )
        )
    return tuple(found)


def utilisation(model: Model, context: int, name: str) -> tuple[float, float]:
    """MFU in percent, and the most GiB of residuals of a rank."""
    ranks = model.ranks
    chunks = 1 if name == "1f1b" else max(1, model.layers // ranks)
    stages, placement = registry.default_placement(name, ranks, chunks)
    cluster = machines(ranks)
    costs = stage_costs(model, context, layers_of(model, ranks, chunks))
    message = 2 * context * model.hidden
    sized = (replace(each, value=replace(each.value, shape=(message // 4,))) for each in stages.crossings)
    stages = replace(stages, crossings=tuple(sized))
    given = dict(
        costs=costs,
        uplinks=uplinks.shared_uplinks(costs, ranks, 2),
        transfer_s=message / cluster.within_node.bandwidth_bytes_per_s,
    )
    schedule = registry.build(name, stages, placement, model.batch, **given)
    timeline = simulate(lower(schedule, stages), stages, costs, cluster)
    matmuls, attention, head = operations(model, context)
    whole = (model.layers - 2) * (3 * matmuls + 3 * attention) + 3 * head
    mfu = whole * model.batch / timeline.step_s / (ranks * PEAK_FLOPS)
    return 100 * mfu, max(peak.get("residuals", 0) for peak in timeline.peaks) / 2**30


def figure_15(key: tuple[str, str]) -> Iterator[dict[str, Any]]:
    for schedule, mfu, gigabytes in zip(SCHEDULES, *PUBLISHED[key], strict=True):
        ours = utilisation(MODELS[key[0]], CONTEXTS[key[1]], schedule)
        row = {"model": key, "schedule": schedule, "mfu": ours[0], "gib": ours[1]}
        yield row | {"paper_mfu": mfu, "paper_gb": gigabytes}


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "paper": lambda: [row for key in PUBLISHED for row in figure_15(key)],
    "paced": lambda: pace("copies", ranks=4, microbatches=8, seconds=0.3, rounds=3),
}


def main() -> int:
    return run_parts(parser_of(__doc__, PARTS).parse_args().parts, PARTS)


if __name__ == "__main__":
    sys.exit(main())
