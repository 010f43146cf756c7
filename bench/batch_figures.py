"""Arithmetic of bench/max_batch.py: what cells say of planners against each other. Imports no torch.

A cell is one model on one cluster under one cap with one way of updating weights; it has a row per planner:

    {"batch": largest micro-batch, 0 if none fits, "samples_per_s": at it, "at": {size: samples per second}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, log
from typing import Any, TypeAlias

Cell: TypeAlias = Mapping[str, Any]
Ratio: TypeAlias = Callable[[Cell], float | None]
"""None where a planner that is compared has no plan."""

PAPER = {
    "batch, dawnpiper / vpipe": 4.0,
    "batch, dawnpiper / pipedream": 11.0,
    "speed, dawnpiper / vpipe": 1.5,
}
"""The largest that DawnPiper's abstract claims (arXiv 2505.05856); of averages it says nothing."""


def geometric_mean(ratios: Sequence[float]) -> float:
    """
    >>> geometric_mean([2.0, 8.0])
    4.0
    """
    return round(exp(sum(map(log, ratios)) / len(ratios)), 12)


def batch_ratio(ours: str, theirs: str) -> Ratio:
    """How many times larger one planner's largest micro-batch is than another's."""

    def ratio(cell: Cell) -> float | None:
        first, second = (cell["planners"][name]["batch"] for name in (ours, theirs))
        return first / second if first and second else None

    return ratio


def speed_ratio(ours: str, theirs: str, *, everyone: bool = False) -> Ratio:
    """How many times faster a planner's plan is than another's at the largest size that both have a plan
    for, or that every planner has one for."""

    def ratio(cell: Cell) -> float | None:
        size = common_size(cell, cell["planners"] if everyone else (ours, theirs))
        if not size:
            return None
        first, second = (cell["planners"][name]["at"][str(size)] for name in (ours, theirs))
        return float(first / second) if first and second else None

    return ratio


def common_size(cell: Cell, planners: Iterable[str]) -> int:
    """The largest micro-batch that all of these planners have a plan for; 0 if one has none."""
    return min(int(cell["planners"][name]["batch"]) for name in planners)


RATIOS: dict[str, Ratio] = {
    "batch, dawnpiper / vpipe": batch_ratio("dawnpiper", "vpipe"),
    "batch, dawnpiper / pipedream": batch_ratio("dawnpiper", "pipedream"),
    "batch, probe / dawnpiper": batch_ratio("probe", "dawnpiper"),
    "speed, dawnpiper / vpipe": speed_ratio("dawnpiper", "vpipe"),
    "speed, dawnpiper / vpipe, at everyone's size": speed_ratio("dawnpiper", "vpipe", everyone=True),
    "speed, probe / dawnpiper": speed_ratio("probe", "dawnpiper"),
}


def compared(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Of each ratio: the best and the worst cell, the geometric mean, and how many cells count; beside
    what the paper claims."""
    table = {}
    for name, ratio in RATIOS.items():
        found = [(value, cell["name"]) for cell in cells if (value := ratio(cell)) is not None]
        if found:
            best, worst = max(found), min(found)
            table[name] = {
                "best": round(best[0], 3),
                "best_in": best[1],
                "mean": round(geometric_mean([value for value, _ in found]), 3),
                "worst": round(worst[0], 3),
                "worst_in": worst[1],
                "cells": len(found),
                "paper_up_to": PAPER.get(name),
            }
    return table


def groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """All cells, and those of each way of updating weights and of each cap."""
    named: dict[str, list[Cell]] = {"all": list(cells)}
    for cell in cells:
        for key in (f"weights {cell['weights']}", f"cap {cell['cap']}", f"model {cell['model']}"):
            named.setdefault(key, []).append(cell)
    return named


def reasons(cells: Sequence[Cell]) -> list[str]:
    """Why the ratios are what they are: what fills the fullest stages at the largest sizes."""
    said = []
    for planner in ("pipedream", "vpipe", "dawnpiper"):
        rows = [row for cell in cells if (row := cell["planners"][planner])["batch"]]
        if not rows:
            continue
        first = sum(row["fullest"]["stage"] == 0 for row in rows)
        last = sum(row["fullest"]["stage"] == row["fullest"]["stages"] - 1 for row in rows)
        shares = ", ".join(
            f"{kind} {sum(row['fullest'][kind] for row in rows) / len(rows):.0%}" for kind in KINDS
        )
        said.append(
            f"{planner}: the fullest stage is the first in {first} of {len(rows)} plans and the last in "
            f"{last}; on average it holds {shares}"
        )
    said += _most_freed(cells)
    best = compared(cells)
    for name in ("batch, dawnpiper / vpipe", "batch, dawnpiper / pipedream"):
        if name in best:
            said.append(
                f"{name}: largest in {best[name]['best_in']} (x{best[name]['best']:.2f}), smallest in "
                f"{best[name]['worst_in']} (x{best[name]['worst']:.2f})"
            )
    alone = [c["name"] for c in cells if c["planners"]["dawnpiper"]["batch"]]
    for other in ("pipedream", "vpipe"):
        without = [name for c in cells if (name := c["name"]) in alone and not c["planners"][other]["batch"]]
        if without:
            said.append(f"dawnpiper has a plan where {other} has none, in no ratio: {'; '.join(without)}")
    return said


def _most_freed(cells: Sequence[Cell]) -> list[str]:
    """How near the batches come to what freeing can give at most."""
    many = [cell for cell in cells if cell["planners"]["pipedream"]["batch"] >= MANY]
    ratio = batch_ratio("dawnpiper", "pipedream")
    found = [(value, cell["devices"]) for cell in many if (value := ratio(cell)) is not None]
    if not found:
        return []
    mean, most = geometric_mean([value for value, _ in found]), max(found)
    return [
        "what is recomputed is made again inside the backward, by planners of ops and of layers alike: one "
        "micro-batch is never there in full, and what remains is checkpoints, the scratch of the widest ops "
        f"and the state, which no treatment frees. Where pipedream has a plan for {MANY} rows or more, "
        f"dawnpiper has one for {mean:.2f} times as many on average, at most {most[0]:.2f} times on "
        f"{most[1]} devices; with few rows, ratios of whole numbers are larger"
    ]


MANY = 10
KINDS = ("state", "residuals", "boundary", "transient")
"""Of what is held at the peak: parameters with their gradients, optimizer state and versions, and buffers;
residuals; messages; scratch of one action."""


def fullest(plan: Any) -> dict[str, Any]:
    """The stage of a plan that fills most of its cap, and the shares of its peak by kind."""
    stage = max(range(len(plan.stages)), key=lambda s: plan.stages[s].memory.total / plan.caps[s])
    memory = plan.stages[stage].memory
    other = memory.residuals + memory.boundary + memory.transient
    sizes = (memory.total - other, memory.residuals, memory.boundary, memory.transient)
    shares = {kind: round(size / memory.total, 4) for kind, size in zip(KINDS, sizes, strict=True)}
    filled = round(memory.total / plan.caps[stage], 4)
    return {"stage": stage, "stages": len(plan.stages), "filled": filled, **shares}
