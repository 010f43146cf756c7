"""PipeOffload (arXiv 2503.01328): how much memory copies in schedules free, and what they cost.

    python bench/pipeoffload.py peaks memory paper paced [--quick]

peaks       `po:offload=n` for p = 3, 4, 8, 16 ranks of v = 2, 4, 8 stages, every n, k = 0.5, 0.75, 1.0, m =
            4p; pairs of ranks share an uplink: the most residuals of a rank, in those of one micro-batch on
            one stage, simulated and if copies end only where they are awaited, beside
            p (v - n) (v - n + 1) / 2v + 3 (4 for n = v); and 1F1B with all of it copied; and the step over
            that of the same order without copies
memory      real ranks: 16 alike blocks, two stages on each of 2, 4 and 8 ranks, n = 0, half and all:
            residual peaks beside predicted ones
paper       the paper's models on its machine, beside what it published. A layer of b sequences of s tokens
            and width h, with g = key-value heads / heads, takes 2 b s h^2 (10 + 2 g) operations in the
            matmuls of each of F, I and W, and 4 b s^2 h for attention in F, twice that in I. It keeps
            20 b s h bytes of half precision (appendix C), less 4 b s h (1 - g) that grouped queries save;
            that is ours, and gives the paper's gigabytes. The first stage has one layer less and the
            embedding, the last one less and the head. Assumed: a vocabulary of 50304, micro-batches of one
            sequence. tests/planner has its table of k.
paced       ranks whose stages and copies sleep: the step beside the simulated one, k = 0.5 and 1.0

Times are in units of one stage's F, I and W of 1 each. --quick: few cases, to see that it runs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from machine import (
    changed,
    next_tokens,
    on_ranks,
    parser_of,
    run_parts,
)

# isort: split
from model import Gpt
from pacing import pace

from pipeloom import Job, Options, Pipeline, Plan, plan
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.action import AWAIT, COPYING, RELOAD, B, F, W
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.schedule import Schedule
from pipeloom.lowering.passes import lower
from pipeloom.planning import capture, profile
from pipeloom.schedules import registry
from pipeloom.schedules.language import uplinks
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, SimulatedSchedule, simulate_schedule
from pipeloom.simulator.simulate import simulate

Table = list[dict[str, Any]]
RATIOS = (0.5, 0.75, 1.0)

# --- schedules with copies ------------------------------------------------------------------------


def at_worst(schedule: Schedule) -> int:
    """The most residuals of a stage that a rank holds if a copy ends only when it is awaited."""
    worst = 0
    for row in schedule.rows:
        awaited = {(a.stage, a.microbatch) for a in row if a.kind == AWAIT}
        held = 0
        for action in row:
            again = action.kind == RELOAD and (action.stage, action.microbatch) in awaited
            held += int(action.kind == F) + int(again) - int(action.kind == AWAIT)
            worst = max(worst, held)
            held -= int(action.kind in (B, W))
    return worst


def simulated(name: str, p: int, v: int, m: int, k: float) -> SimulatedSchedule:
    times = MicrobatchTimes(forward_s=float(v), input_grad_s=float(v), weight_grad_s=float(v))
    scenario = Scenario(ranks=p, chunks=v, microbatches=m, times=times, copy_ratio=k, per_uplink=2)
    return simulate_schedule(name, scenario)


def without_copies(made: SimulatedSchedule) -> float:
    """The step of the same order without copies, in seconds."""
    rows = tuple(tuple(a for a in row if a.kind not in COPYING) for row in made.schedule.rows)
    plain = replace(made.schedule, rows=rows)
    costs = uplinks.with_copies(equal_costs(made.schedule.stages), 1.0)
    return simulate(lower(plain, made.stages), made.stages, costs, made.cluster).step_s


def peaks(quick: bool) -> Table:
    ranks, chunks = ((3, 4), (2, 4)) if quick else ((3, 4, 8, 16), (2, 4, 8))
    cases = [("po", p, v, n, k) for p, v in product(ranks, chunks) for n in range(1, v + 1) for k in RATIOS]
    cases += [("1f1b", p, 1, 1, k) for p, k in product(ranks, RATIOS)]
    rows = []
    for name, p, v, n, k in cases:
        made = simulated(f"{name}:offload={n}", p, v, 4 * p, k)
        bound = p * (v - n) * (v - n + 1) / (2 * v) + 3 if n < v else 4.0
        row = {"schedule": name, "p": p, "v": v, "n": n, "k": k, "peak": made.peak * v}
        row |= {"at_worst": at_worst(made.schedule), "bound": bound}
        rows.append(row | {"step_over_same_order": made.summary.step_s / without_copies(made)})
    within = [max(row["peak"], row["at_worst"]) <= row["bound"] + 1e-9 for row in rows]
    print(f"peaks: {sum(within)} of {len(rows)} within the bound, none refused")
    return rows


# --- real ranks -----------------------------------------------------------------------------------

RANKS, CHUNKS = (2, 4, 8), 2
BLOCKS, LETTERS, ROWS_HERE = 16, 256, 2
even_tokens = next_tokens(LETTERS, 128)


def even_job() -> Job:
    return Job(model=partial(Gpt, BLOCKS, LETTERS), batch=even_tokens, name="GPT of 16 blocks")


def train(made: Plan, folder: Path) -> dict[str, int]:
    """A few steps of one rank: its peaks, measured and predicted, and the largest residuals of a stage."""
    with Pipeline(even_job(), made, options=Options(offload_dir=folder)) as pipeline:
        predicted, rank = pipeline.expected, pipeline.rank
        own = [stage for stage, home in zip(made.stages, made.placement, strict=True) if home == rank]
        for step in range(2):
            pipeline.step(even_tokens(step, ROWS_HERE * made.microbatches))
        return {
            "residuals": pipeline.ledger.residual_peak,
            "predicted": predicted.residual_peaks[rank],
            "host": pipeline.ledger.host_peak,
            "predicted_host": predicted.peak_bytes(rank, "host"),
            "slot": max(stage.kept_bytes + stage.offloaded_bytes for stage in own),
        }


def measured_peaks(quick: bool) -> Table:
    captured = capture(even_job(), ROWS_HERE)
    shared = {"captured": captured, "profiled": profile(captured), "microbatch_size": ROWS_HERE}
    rows: Table = []
    for ranks, name in product(RANKS[:1] if quick else RANKS, ("po:offload=0", "po_h", "po_f")):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            how = {} if "offload=0" in name else {"offload_dir": folder, "treatments": ()}
            schedule = f"{name}{',' if ':' in name else ':'}v={CHUNKS}"
            made = plan(even_job(), ranks=ranks, microbatches=4 * ranks, schedule=schedule, **shared, **how)
            found = on_ranks(train, ranks, made, folder)
        row: dict[str, Any] = {"schedule": name, "ranks": ranks}
        row |= {key: [each[key] for each in found] for key in ("residuals", "predicted", "host")}
        row["times_ranks"] = max(row["residuals"]) * ranks
        apart = [(e["residuals"] - e["predicted"], e["host"] - e["predicted_host"]) for e in found]
        row["over predicted, in slots"] = [
            over / each["slot"] for each, overs in zip(found, apart, strict=True) for over in overs
        ]
        rows.append(row)
    by_name = {
        name: [row for row in rows if row["schedule"] == name] for name in ("po:offload=0", "po_h", "po_f")
    }
    for name, own in by_name.items():
        measured, predicted = (
            spread([row["ranks"] * max(row[what]) for row in own]) for what in ("residuals", "predicted")
        )
        print(
            f"{name}: bytes of the fullest rank x ranks are within {measured:.1%} of their mean, predicted "
            f"{predicted:.1%}",
            flush=True,
        )
    return rows


def spread(values: list[int]) -> float:
    """The largest deviation from the mean, as a share of it."""
    mean = sum(values) / len(values)
    return max(abs(value / mean - 1) for value in values)


# --- the paper's models ---------------------------------------------------------------------------

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


def paper(quick: bool) -> Table:
    return [row for key in [*PUBLISHED][: 1 if quick else None] for row in figure_15(key)]


def paced(quick: bool) -> Table:
    seconds, rounds = (0.03, 1) if quick else (0.3, 3)
    return pace("copies", ranks=4, microbatches=8, seconds=seconds, rounds=rounds)


PARTS: dict[str, Callable[[bool], Table]] = {
    "peaks": peaks,
    "memory": measured_peaks,
    "paper": paper,
    "paced": paced,
}


def main() -> int:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    return run_parts(given.parts, {name: partial(part, given.quick) for name, part in PARTS.items()})


if __name__ == "__main__":
    sys.exit(main())
