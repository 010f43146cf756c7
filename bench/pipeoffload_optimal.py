"""Placements of copies against all that there are, for few ranks and micro-batches.

The exact solver tries all choices of which residuals leave and in front of which action each returns,
on all ranks at once, each with the least waits that keep a limit, and simulates them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from pipeloom.ir.action import AWAIT, OFFLOAD, RELOAD, Action, B, F, I, W
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.copies import uplinks
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, simulate_schedule
from pipeloom.simulator.simulate import simulate

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


def held_of(row: Row) -> int:
    """The most that a row holds if a copy ends only where it is awaited."""
    awaited = {a.microbatch for a in row if a.kind == AWAIT}
    held = most = 0
    for action in row:
        held += int(action.kind == F) - int(action.kind == AWAIT)
        held += int(action.kind == RELOAD and action.microbatch in awaited)
        most = max(most, held)
        held -= int(action.kind in (B, W))
    return most


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
                        "peak": max(map(held_of, ours.schedule.rows)),
                        "step_s": step_of(tuple(ours.schedule.rows), stages, costs),
                    }
                case = {"schedule": name, "p": ranks, "m": count, "k": k, "limit": limit}
                rows.append({**case, "best_step_s": None if best == float("inf") else best, **found})
    lost = [row for row in rows if row["best_step_s"] is not None and "refused" in row]
    gaps = [row["step_s"] / row["best_step_s"] for row in rows if row["best_step_s"] and "step_s" in row]
    print(f"optimality: {len(rows)} cases, {len(lost)} refused of those that have a placement")
    print(f"optimality: step over the shortest under the same limit: at most {max(gaps):.3f}")
    return rows
