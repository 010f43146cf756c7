"""Copies in schedules: how much memory they free, what they cost, and how near they are to the best.

    python bench/pipeoffload.py peaks overhead optimality memory [--quick]

peaks       `po:offload=n` for p = 3, 4, 8, 16 ranks of v = 2, 4, 8 stages, every n, k = 0.5, 0.75, 1.0, m =
            4p; pairs of ranks share an uplink: the most residuals of a rank, in those of one micro-batch on
            one stage, simulated and if copies end only where they are awaited, beside
            p (v - n) (v - n + 1) / 2v + 3 (4 for n = v); and 1F1B with all of it copied
overhead    step at m = 8p less that at m = 4p, which leaves out the warm-up, over the same for the same order
            without copies, and for the fastest schedule of the library; seconds for p = 32, v = 4, m = 128
optimality  2 and 3 ranks and up to 4 micro-batches against all placements of copies: all choices of which
            residuals leave and in front of which action each returns, each with the least waits that keep a
            limit, simulated: the shortest step under the peak of ours
memory      real ranks: one model on 2, 4 and 8 of them, n = 0, half and all: residual peaks beside predicted
grid        `pipeoffload` beside `dawnpiper` on A100, H200 and CPU at 21 caps; lowest: the least cap at which
            each has a plan, by bisection
planner     the same for larger models and caps, as many as there is time for; offload_only: where nothing may
            be made again
ratio       k of captured GPTs beside the paper's formula; paper: the paper's models, simulated
paced       ranks whose stages and copies sleep: the step beside the simulated one, k = 0.5 and 1.0

Times are in units of one stage's F, I and W of 1 each. Each section prints a table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from machine import print_stamp, print_table
from pacing import pace
from pipeoffload_memory import memory
from pipeoffload_paper import paper
from pipeoffload_planner import grid, lowest, offload_only, planner, ratio

from pipeloom.ir.action import AWAIT, COPYING, OFFLOAD, RELOAD, Action, B, F, I, W
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.language import uplinks
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, SimulatedSchedule, simulate_schedule
from pipeloom.simulator.simulate import simulate

RATIOS = (0.5, 0.75, 1.0)
FASTEST = ("gis", "interleaved_1f1b", "po", "zb_v")


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
    costs = uplinks.with_copies(unit_costs(made.schedule.stages), 1.0)
    return simulate(lower(plain, made.stages), made.stages, costs, made.cluster).step_s


def unit_costs(stages: int) -> tuple[StageCost, ...]:
    return equal_costs(stages)


def bound(p: int, v: int, n: int) -> float:
    return p * (v - n) * (v - n + 1) / (2 * v) + 3 if n < v else 4.0


def cases(quick: bool) -> Iterator[tuple[str, int, int, int, float]]:
    """Name, ranks, stages per rank, stages copied, k."""
    ranks, chunks = ((3, 4), (2, 4)) if quick else ((3, 4, 8, 16), (2, 4, 8))
    for p, v in product(ranks, chunks):
        for n, k in product(range(1, v + 1), RATIOS):
            yield f"po:offload={n}", p, v, n, k
    for p, k in product(ranks, RATIOS):
        yield "1f1b:offload=1", p, 1, 1, k


def peaks(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, p, v, n, k in cases(quick):
        made = simulated(name, p, v, 4 * p, k)
        row = {"schedule": name, "p": p, "v": v, "n": n, "k": k}
        row |= {"peak": made.peak * v, "at_worst": at_worst(made.schedule), "bound": bound(p, v, n)}
        row["step_over_same_order"] = made.summary.step_s / without_copies(made)
        rows.append(row)
    passed = [max(row["peak"], row["at_worst"]) <= row["bound"] + 1e-9 for row in rows]
    print(f"peaks: {sum(passed)} of {len(rows)} within the bound, none refused")
    return rows


def overhead(quick: bool) -> list[dict[str, Any]]:
    rows = []
    ranks, chunks = ((4,), (2, 4)) if quick else ((4, 8, 16), (2, 4))
    asked = [("po", p, v, n) for p, v in product(ranks, chunks) for n in range(1, v + 1)]
    asked += [("1f1b", p, 1, 1) for p in ranks]
    for name, p, v, n in asked:
        fastest = min(_per_step(other, p, v, 0.75)[0] for other in FASTEST) if v > 1 else None
        for k in (*RATIOS, 1.3):
            ours, same = _per_step(f"{name}:offload={n}", p, v, k)
            row = {"schedule": name, "p": p, "v": v, "n": n, "k": k, "over_same_order": ours / same}
            rows.append(row | {"over_fastest": None if fastest is None else ours / fastest})
    worst = {k: max(r["over_same_order"] for r in rows if r["k"] == k) for k in (*RATIOS, 1.3)}
    simulated("po:offload=2", 32, 4, 128, 0.75)
    begin = time.perf_counter()
    simulated("po:offload=2", 32, 4, 128, 0.75)
    seconds = time.perf_counter() - begin
    print(f"overhead, worst by k: {worst}; p=32 v=4 m=128 in {seconds:.2f} s")
    return rows


def _per_step(name: str, p: int, v: int, k: float) -> tuple[float, float]:
    """Seconds of 4p micro-batches in the middle, and those of the same order without copies."""
    few, many = (simulated(name, p, v, count * p, k) for count in (4, 8))
    return many.summary.step_s - few.summary.step_s, without_copies(many) - without_copies(few)


# --- all placements ---------------------------------------------------------------------------------------

SIZE = 1 << 20
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
        return float("inf")
    assert count <= MOST, f"{count} placements are too many to try"
    best, least = float("inf"), step_of(rows, stages, costs)
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
    devices = tuple(
        Device(name="any", memory_bytes=1, switch=f"s{rank // 2}", host_link=uplink) for rank in where
    )
    switches = {f"s{rank // 2}": uplink for rank in where}
    cluster = Cluster(devices=devices, within_node=link, switches=switches)
    return simulate(lower(made, stages), stages, costs, cluster).step_s


def optimality(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, ranks, count, ratios in CASES[:2] if quick else CASES:
        for k in ratios:
            stages = chain(ranks)
            costs = uplinks.with_copies(equal_costs(ranks, residual_bytes=SIZE), k)
            plain = registry.build(name, stages, tuple(range(ranks)), count)
            times = MicrobatchTimes()
            scenario = Scenario(ranks=ranks, microbatches=count, times=times, copy_ratio=k, per_uplink=2)
            for limit in range(1, count + 1):
                best = least_step(tuple(plain.rows), stages, costs, limit)
                try:
                    ours = simulate_schedule(f"{name}:limit={limit}", scenario)
                except ScheduleError as error:
                    found = {"refused": error.message}
                else:
                    found = {
                        "peak": at_worst(ours.schedule),
                        "step_s": step_of(tuple(ours.schedule.rows), stages, costs),
                    }
                case = {"schedule": name, "p": ranks, "m": count, "k": k, "limit": limit}
                rows.append({**case, "best_step_s": None if best == float("inf") else best, **found})
    lost = [row for row in rows if row["best_step_s"] is not None and "refused" in row]
    gaps = [row["step_s"] / row["best_step_s"] for row in rows if row["best_step_s"] and "step_s" in row]
    print(f"optimality: {len(rows)} cases, {len(lost)} refused of those that have a placement")
    print(f"optimality: step over the shortest under the same limit: at most {max(gaps):.3f}")
    return rows


# --- main -------------------------------------------------------------------------------------------------


def paced(quick: bool) -> list[dict[str, Any]]:
    seconds, rounds = (0.03, 1) if quick else (0.3, 3)
    found = pace("copies", ranks=4, microbatches=8, seconds=seconds, rounds=rounds)
    rows: list[dict[str, Any]] = found["rows"]
    return rows


SECTIONS = {
    "peaks": peaks,
    "overhead": overhead,
    "optimality": optimality,
    "memory": memory,
    "grid": grid,
    "lowest": lowest,
    "planner": planner,
    "offload_only": offload_only,
    "ratio": ratio,
    "paper": paper,
    "paced": paced,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[*SECTIONS])
    parser.add_argument("--quick", action="store_true", help="few cases, to see that it runs")
    chosen = parser.parse_args()
    print_stamp()
    for name in chosen.sections:
        begin = time.perf_counter()
        print_table(SECTIONS[name](chosen.quick), name)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
