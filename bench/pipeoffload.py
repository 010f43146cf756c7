"""PipeOffload (arXiv 2503.01328): how much memory copies in schedules free, and what they cost.

    python bench/pipeoffload.py peaks overhead optimality memory [--quick]

peaks       `po:offload=n` for p = 3, 4, 8, 16 ranks of v = 2, 4, 8 stages, every n, k = 0.5, 0.75, 1.0, m =
            4p; pairs of ranks share an uplink: the most residuals of a rank, in those of one micro-batch on
            one stage, simulated and if copies end only where they are awaited, beside
            p (v - n) (v - n + 1) / 2v + 3 (4 for n = v); and 1F1B with all of it copied
overhead    step at m = 8p less that at m = 4p, which leaves out the warm-up, over the same for the same order
            without copies; seconds for p = 32, v = 4, m = 128
optimality  2 and 3 ranks and up to 4 micro-batches against all placements of copies: all choices of which
            residuals leave and in front of which action each returns, each with the least waits that keep a
            limit, simulated: the shortest step under the peak of ours
memory      real ranks: 16 alike blocks, two stages on each of 2, 4 and 8 ranks, n = 0, half and all:
            residual peaks beside predicted ones
grid        `pipeoffload` beside `dawnpiper` on A100, H200 and CPU at 21 caps; lowest: the least cap at which
            each has a plan, by bisection. Transformers of width 2048 and context 1024 by roofline, with
            AdamW; the CPU's with this machine's disk to offload to. Caps are shares of what a rank of `1f1b`
            holds where there is none.
ratio       k of captured GPTs beside the paper's formula
paper       the paper's models on its machine, beside what it published. A layer of b sequences of s tokens
            and width h, with g = key-value heads / heads, takes 2 b s h^2 (10 + 2 g) operations in the
            matmuls of each of F, I and W, and 4 b s^2 h for attention in F, twice that in I. It keeps
            20 b s h bytes of half precision (appendix C), less 4 b s h (1 - g) that grouped queries save;
            that is ours, and gives the paper's gigabytes. The first stage has one layer less and the
            embedding, the last one less and the head. Assumed: a vocabulary of 50304, micro-batches of one
            sequence.
paced       ranks whose stages and copies sleep: the step beside the simulated one, k = 0.5 and 1.0

Times are in units of one stage's F, I and W of 1 each. --quick: few cases, to see that it runs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from machine import (
    FREE,
    changed,
    next_tokens,
    on_ranks,
    parser_of,
    print_table,
    roofline_plan,
    run_parts,
    save_plot,
    tokens,
)

# isort: split
from layered import layered
from model import Gpt
from pacing import pace

from pipeloom import Job, Options, Pipeline, Plan, plan
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.action import AWAIT, COPYING, OFFLOAD, RELOAD, Action, B, F, I, W
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import InfeasibleError, ScheduleError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.memory_policy import Treatment
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.lowering.passes import lower
from pipeloom.machine import with_files
from pipeloom.planner.plan_table import copy_loads, transformer_ratio
from pipeloom.planner.request import PlanOptions
from pipeloom.planning import capture, profile
from pipeloom.schedules import registry
from pipeloom.schedules.language import uplinks
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, SimulatedSchedule, simulate_schedule
from pipeloom.simulator.simulate import simulate
from pipeloom.train.model import GPT

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


def overhead(quick: bool) -> Table:
    rows = []
    ranks, chunks = ((4,), (2, 4)) if quick else ((4, 8, 16), (2, 4))
    ratios = (*RATIOS, 1.3)
    asked = [("po", p, v, n) for p, v in product(ranks, chunks) for n in range(1, v + 1)]
    asked += [("1f1b", p, 1, 1) for p in ranks]
    for (name, p, v, n), k in product(asked, ratios):
        few, many = (simulated(f"{name}:offload={n}", p, v, count * p, k) for count in (4, 8))
        share = (many.summary.step_s - few.summary.step_s) / (without_copies(many) - without_copies(few))
        rows.append({"schedule": name, "p": p, "v": v, "n": n, "k": k, "over_same_order": share})
    worst = {k: max(row["over_same_order"] for row in rows if row["k"] == k) for k in ratios}
    simulated("po:offload=2", 32, 4, 128, 0.75)
    begin = time.perf_counter()
    simulated("po:offload=2", 32, 4, 128, 0.75)
    print(f"overhead, worst by k: {worst}; p=32 v=4 m=128 in {time.perf_counter() - begin:.2f} s")
    return rows


# --- all placements of copies ---------------------------------------------------------------------

CASES = (
    ("1f1b", 2, 2, (0.5, 1.0)),
    ("1f1b", 2, 3, (0.5, 1.0)),
    ("1f1b", 3, 2, (0.5, 1.0)),
    ("gpipe", 2, 2, (0.5, 1.0)),
    ("1f1b", 2, 4, (1.0,)),
    ("gpipe", 2, 3, (1.0,)),
)
"""Schedule, ranks, micro-batches, and k."""

MOST = 200_000
"""Placements of a case."""

Row = tuple[Action, ...]


def placements(row: Row) -> Iterator[dict[int, int]]:
    """Forward's place -> the place of the action in front of which it returns, for those that leave."""
    forwards = [at for at, action in enumerate(row) if action.kind == F]
    choices = []
    for at in forwards:
        back = next(n for n, a in enumerate(row) if a.kind in (B, I) and a.microbatch == row[at].microbatch)
        choices.append([-1, *range(at + 1, back + 1)])
    for chosen in product(*choices):
        yield {at: place for at, place in zip(forwards, chosen, strict=True) if place >= 0}


def with_waits(row: Row, leaves: dict[int, int], limit: int) -> Row | None:
    """The row with copies, and AWAITs in front of what would pass the limit; None if that cannot be kept."""
    made: list[Action] = []
    held, leaving = 0, list[Action]()
    returning: dict[int, list[Action]] = {}
    for at, place in leaves.items():
        returning.setdefault(place, []).append(row[at])
    for at, action in enumerate(row):
        taken: list[Action | None] = [*returning.get(at, ()), *([None] if action.kind == F else [])]
        for wanted in taken:
            if wanted is not None and wanted in leaving:
                leaving.remove(wanted)  # it goes on with what has not left
                made.append(replace(wanted, kind=RELOAD))
                continue
            while held + 1 > limit and leaving:
                made.append(replace(leaving.pop(0), kind=AWAIT))
                held -= 1
            if held + 1 > limit:
                return None
            held += 1
            if wanted is not None:
                made.append(replace(wanted, kind=RELOAD))
        made.append(action)
        held -= int(action.kind in (B, W))
        if at in leaves:
            made.append(replace(action, kind=OFFLOAD))
            leaving.append(action)
    return tuple(made)


def least_step(rows: tuple[Row, ...], stages: StageGraph, costs: tuple[StageCost, ...], limit: int) -> float:
    """Seconds of the shortest step of all placements under a limit per rank; inf if none keeps it."""
    ways = [
        list(dict.fromkeys(made for leaves in placements(row) if (made := with_waits(row, leaves, limit))))
        for row in rows
    ]
    count = 1
    for found in ways:
        count *= len(found)
    if not count:
        return inf
    assert count <= MOST, f"{count} placements are too many to try"
    best, least = inf, step_of(rows, stages, costs)
    for chosen in product(*ways):
        best = min(best, step_of(chosen, stages, costs))
        if best <= least + 1e-9:  # no copies make it shorter
            break
    return best


def step_of(rows: tuple[Row, ...], stages: StageGraph, costs: tuple[StageCost, ...]) -> float:
    microbatches = 1 + max(action.microbatch for row in rows for action in row)
    where = tuple(range(len(rows)))
    made = Schedule(name="", microbatches=microbatches, placement=where, rows=rows)
    link = Link(bandwidth_bytes_per_s=1e30)
    uplink = Link(bandwidth_bytes_per_s=costs[0].offloaded_bytes / costs[0].offload_s)
    device = Device(name="any", memory_bytes=1, host_link=uplink)
    devices = tuple(replace(device, switch=f"s{rank // 2}") for rank in where)
    switches = {f"s{rank // 2}": uplink for rank in where}
    cluster = Cluster(devices=devices, within_node=link, switches=switches)
    return simulate(lower(made, stages), stages, costs, cluster).step_s


def optimality(quick: bool) -> Table:
    rows: Table = []
    for name, ranks, count, ratios in CASES[:2] if quick else CASES:
        for k, limit in product(ratios, range(1, count + 1)):
            stages = chain(ranks)
            costs = uplinks.with_copies(equal_costs(ranks, residual_bytes=1 << 20), k)
            plain = registry.build(name, stages, tuple(range(ranks)), count)
            times = MicrobatchTimes()
            scenario = Scenario(ranks=ranks, microbatches=count, times=times, copy_ratio=k, per_uplink=2)
            best = least_step(tuple(plain.rows), stages, costs, limit)
            row: dict[str, Any] = {"schedule": name, "p": ranks, "m": count, "k": k, "limit": limit}
            row["best_step_s"] = None if best == inf else best
            try:
                ours = simulate_schedule(f"{name}:limit={limit}", scenario)
            except ScheduleError as error:
                row["refused"] = error.message
            else:
                row["peak"] = at_worst(ours.schedule)
                row["step_s"] = step_of(tuple(ours.schedule.rows), stages, costs)
            rows.append(row)
    lost = [row for row in rows if row["best_step_s"] is not None and "refused" in row]
    gaps = [row["step_s"] / row["best_step_s"] for row in rows if row["best_step_s"] and "step_s" in row]
    print(f"optimality: {len(rows)} cases, {len(lost)} refused of those that have a placement")
    print(f"optimality: step over the shortest under the same limit: at most {max(gaps):.3f}")
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
    if not quick:
        draw(by_name)
    return rows


def spread(values: list[int]) -> float:
    """The largest deviation from the mean, as a share of it."""
    mean = sum(values) / len(values)
    return max(abs(value / mean - 1) for value in values)


def draw(by_name: dict[str, Table]) -> None:
    """The most residuals of any rank, measured, and predicted (dashed), over the number of ranks."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for (name, rows), ink in zip(by_name.items(), ("#888888", "#1f77b4", "#d62728"), strict=True):
        for what, dash, note in (("residuals", "solid", ""), ("predicted", "dash", ", predicted")):
            figure.add_scatter(
                x=[row["ranks"] for row in rows],
                y=[max(row[what]) / 2**20 for row in rows],
                mode="lines+markers",
                name=name.split(":")[0] + note,
                line={"color": ink, "dash": dash},
            )
    figure.update_xaxes(title="ranks", type="log", tickvals=RANKS)
    figure.update_yaxes(title="most residuals of a rank, MiB", rangemode="tozero")
    save_plot(figure, "offloading.png", 720, 420)


# --- the planner ----------------------------------------------------------------------------------

WIDTH, CONTEXT, ROWS, MICROBATCHES, LAYERS = 2048, 1024, 16, 8, 2
OFFLOAD_ONLY: tuple[Treatment, ...] = ("offload",)
GRID_CAPS: tuple[tuple[tuple[Treatment, ...] | None, tuple[float, ...]], ...] = (
    (None, (1.0, 0.75, 0.5, 0.44)),
    (OFFLOAD_ONLY, (0.9, 0.7, 0.6)),
)
"""What may be done with residuals (None: all), and caps, down to below what `dawnpiper` needs."""

MOST_S = 540.0
"""No cap is begun after so many seconds."""

BISECTED = ("a100-40", "cpu")
BISECTED_PLANNERS = (("dawnpiper", "1f1b"), ("dawnpiper", "gis_h"), ("pipeoffload", "1f1b"))
LEAST, CLOSE = 0.3, 0.02
"""Share of the largest cap from which on the lowest is sought, none having a plan below, and how closely."""


@cache
def pair_of(device: str) -> Cluster:
    """Two devices; the CPU's with this machine's disk, as fast as it is found to be."""
    if device != "cpu":
        return find_cluster(f"2 x {device}")
    with tempfile.TemporaryDirectory() as folder:
        return with_files(cpu_cluster(2), Path(folder))[0]


def planned(
    graph: OpGraph, cluster: Cluster, planner: str, schedule: str, cap: float = inf, **options: Any
) -> Plan | None:
    """None if nothing fits."""
    if cap < inf:
        cluster = changed(cluster, memory_bytes=int(cap))
    how = {"planner": planner, "schedule": schedule, "microbatches": MICROBATCHES}
    try:
        return roofline_plan(graph, cluster, **how, options=PlanOptions(**options), explained=False)
    except InfeasibleError:
        return None


def grid_model(device: str) -> tuple[OpGraph, Cluster, int]:
    """The model, whose small vocabulary makes no logits that bind; the devices; the fullest rank without a
    cap."""
    graph = layered(LAYERS, hidden=WIDTH, length=CONTEXT, rows=ROWS, vocabulary=256)
    cluster = pair_of(device)
    free = planned(graph, cluster, "exact", "1f1b")
    assert free is not None
    return graph, cluster, max(free.peaks)


def grid(quick: bool) -> Table:
    """Steps of `pipeoffload` and of `dawnpiper` in seconds, and how long they were sought, as far as there is
    time; prints where it is slower, and where it alone has a plan."""
    cases = [(d, a, s) for a, shares in GRID_CAPS for s in shares for d in ("a100-40", "h200", "cpu")]
    rows: Table = []
    start = time.perf_counter()
    for device, allowed, share in cases[-1:] if quick else cases:
        if time.perf_counter() - start > MOST_S:
            break
        graph, cluster, whole = grid_model(device)
        row: dict[str, Any] = {"device": device, "allowed": allowed, "share": share}
        for name, planner, schedule in (
            ("pipeoffload", "pipeoffload", "1f1b"),
            ("1f1b", "dawnpiper", "1f1b"),
            ("gis_h", "dawnpiper", "gis_h"),
        ):
            begin = time.perf_counter()
            made = planned(graph, cluster, planner, schedule, share * whole, treatments=allowed)
            row |= {name: made and made.predicted_step_s, f"{name}, sought in s": time.perf_counter() - begin}
            if name == "pipeoffload":
                row["schedule"] = made and made.schedule
        rows.append(row)
    slower = [
        row
        for row, name in product(rows, ("1f1b", "gis_h"))
        if row[name] and (not row["pipeoffload"] or row["pipeoffload"] > row[name] * (1 + 1e-9))
    ]
    only = [row for row in rows if row["pipeoffload"] and not row["1f1b"] and not row["gis_h"]]
    print(f"slower than dawnpiper at {len(slower)} of {len(rows)} caps, alone fits at {len(only)}")
    return rows


def lowest(quick: bool) -> Table:
    """The lowest cap of each planner, for both that may be done with residuals."""
    rows = []
    planners = BISECTED_PLANNERS[:1] if quick else BISECTED_PLANNERS
    for device in BISECTED[:1] if quick else BISECTED:
        graph, cluster, whole = grid_model(device)
        for (allowed, _), (planner, schedule) in product(GRID_CAPS, planners):
            low, high, name = LEAST, 1.0, None
            while high - low > CLOSE:
                share = (low + high) / 2
                how = {"treatments": allowed, "fastest": False}  # the first that fits will do
                made = planned(graph, cluster, planner, schedule, share * whole, **how)
                low, high = (share, high) if made is None else (low, share)
                name = name if made is None else made.schedule
            row = {"device": device, "allowed": allowed, "planner": f"{planner}, {schedule}"}
            rows.append(row | {"share": high, "bytes": int(high * whole), "schedule": name})
    return rows


def gpt(layers: int, width: int, heads: int, context: int) -> Job:
    model = partial(GPT, layers=layers, width=width, heads=heads, context=context)
    return Job(model=model, batch=tokens(256, context), name="GPT")


def ratio(quick: bool) -> Table:
    """k of captured GPTs by roofline, in the middle of a pipeline, beside the formula."""
    rows = []
    sizes = ((256, 256),) if quick else ((1024, 1024), (2048, 1024), (2048, 2048), (4096, 1024))
    for width, context in sizes:
        graph = capture(gpt(6, width, width // 64, context), 1).graph
        for device in ("a100-80", "h200"):
            cluster = find_cluster(f"3 x {device}")
            one = cluster.devices[0]
            how = {"schedule": "1f1b", "microbatches": 6, "planner": "exact", "treatments": ()}
            load = copy_loads(roofline_plan(graph, changed(cluster, memory_bytes=FREE), **how), cluster)[1]
            assert load is not None and one.host_link is not None
            rate = one.flops_per_s["float32"] * one.efficiency["matmul"]
            host = one.host_link.bandwidth_bytes_per_s
            formula = transformer_ratio(width, context, flops_per_s=rate, host_bytes_per_s=host)
            row = {"device": device, "hidden": width, "context": context, "k": load.ratio, "formula": formula}
            rows.append(row)
    return rows


# --- the paper's models ---------------------------------------------------------------------------

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
NOTHING = ((X,) * 6, (X,) * 6)
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
    ("66.6B", "16k"): NOTHING,
    ("83.8B", "8k"): NOTHING,
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
        found = changed(found, host_link=link, host_link_back=link)
        return replace(found, switches=dict.fromkeys(found.switches, link))


def built_in_machine(name: str) -> Machine:
    device = find_cluster(name).devices[0]
    peak = device.flops_per_s["bfloat16"]
    matmul, attention = (device.efficiency[kind] * peak for kind in ("matmul", "attention"))
    return Machine(name=name, flops_per_s=matmul, attention_flops_per_s=attention, peak_flops_per_s=peak)


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


def stage_costs(
    model: Model, context: int, each: Sequence[int], machine: Machine, link: float, *, ways: int = 1
) -> tuple[StageCost, ...]:
    """each: layers of each stage.  ways: of tensor parallelism: compute and bytes are shared, and two
    all-reduces of the output of a layer stand in F and two in I."""
    matmuls, attention, head = operations(model, context)
    ring_s = 2 * 2 * context * model.hidden * 2 * (ways - 1) / ways / RING_BYTES_PER_S
    kept_bytes = int((20 - 4 * (1 - 8 / model.heads)) * context * model.hidden)
    found = []
    for stage, layers in enumerate(each):
        last = head if stage == len(each) - 1 else 0.0
        weight_s = (layers * matmuls + last) / (machine.flops_per_s * ways)
        attention_s = attention / (machine.attention_flops_per_s * ways)
        input_s = weight_s + layers * (2 * attention_s + ring_s)
        size = layers * kept_bytes // ways
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


def utilisation(
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
    times = registry.Times(
        costs=costs,
        uplinks=uplinks.shared_uplinks(costs, ranks, 2),
        transfer_s=message / cluster.within_node.bandwidth_bytes_per_s,
    )
    schedule = registry.build(name, stages, placement, model.batch, times=times)
    timeline = simulate(lower(schedule, stages), stages, costs, cluster)
    matmuls, attention, head = operations(model, context)
    whole = (model.layers - 2) * (3 * matmuls + 3 * attention) + 3 * head
    mfu = whole * model.batch / timeline.step_s / (model.ranks * machine.peak_flops_per_s)
    return 100 * mfu, max(peak.get("residuals", 0) for peak in timeline.peaks) / 2**30


def figure_15(key: tuple[str, str], machine: Machine) -> Iterator[dict[str, Any]]:
    for schedule, mfu, gigabytes in zip(SCHEDULES, *PUBLISHED[key], strict=True):
        ours = utilisation(MODELS[key[0]], CONTEXTS[key[1]], schedule, machine)
        row = {"model": key, "schedule": schedule, "mfu": ours[0], "gib": ours[1]}
        yield row | {"paper_mfu": mfu, "paper_gb": gigabytes}


def against_tensor(machine: Machine) -> Iterator[dict[str, Any]]:
    """Pipelines alone with `po_f`, over eight-way tensor parallelism with four interleaved stages."""
    for key in TENSOR:
        model, context = MODELS[key[0]], CONTEXTS[key[1]]
        alone = utilisation(model, context, "po_f", machine)
        shared = utilisation(model, context, "interleaved_1f1b", machine, ways=8)
        gain = 100 * (alone[0] / shared[0] - 1)
        yield {"model": key, "gain_percent": gain, "po_f": alone, "tensor": shared, "paper": "12 to 19"}


def paper(quick: bool) -> Table:
    ratios = [
        {"hidden": hidden, "context": context, "k": transformer_ratio(hidden, context), "paper": theirs}
        for hidden, row in THEORY.items()
        for context, theirs in zip(CONTEXTS.values(), row, strict=True)
    ]
    print_table(ratios, "k of the paper's models")
    rows: Table = []
    asked = list(PUBLISHED)
    for label, machine in MACHINES.items():
        wanted = asked[:1] if quick else asked if label == next(iter(MACHINES)) else asked[-2:]
        rows += [{"machine": label} | row for key in wanted for row in figure_15(key, machine)]
        if not quick:
            print_table(list(against_tensor(machine)), f"{label}: gain over tensor parallel pipelines")
    return rows


def paced(quick: bool) -> Table:
    seconds, rounds = (0.03, 1) if quick else (0.3, 3)
    return pace("copies", ranks=4, microbatches=8, seconds=seconds, rounds=rounds)


PARTS: dict[str, Callable[[bool], Table]] = {
    "peaks": peaks,
    "overhead": overhead,
    "optimality": optimality,
    "memory": measured_peaks,
    "grid": grid,
    "lowest": lowest,
    "ratio": ratio,
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
