"""What two of the systems did together: a plan of one, read, searched, drawn or run by another."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from commands import bad, figures, good

import pipeloom
from pipeloom.ir.plan import Plan
from pipeloom.schedules.scenario import load_work

MIB = 1 << 20


def planned(**how: object) -> Plan:
    """Of two stages, on devices described by figures."""
    how = {"ranks": 2, "microbatches": 4, "microbatch_size": 2} | how
    ranks = int(str(how["ranks"])) * int(str(how.get("replicas", 1)))
    return pipeloom.plan(zoo.job("skips"), cluster=f"{ranks} x cpu", **how)  # type: ignore[arg-type]


def test_a_stage_without_residuals_does_not_hide_those_of_others(tmp_path: Path) -> None:
    plan = planned()
    sizes = (MIB, 0)
    stages = [
        replace(stage, memory=replace(stage.memory, residuals=size))
        for stage, size in zip(plan.stages, sizes, strict=True)
    ]
    path = tmp_path / "plan.json"
    replace(plan, stages=tuple(stages)).save(path)
    known = load_work(path).residual_bytes
    assert known[0] > 0 == known[1]
    limit = f"{known[0] / 1024}KiB"  # of one micro-batch
    found = figures("schedule", "search", "--times", path, "-m", "4", "--memory", limit)
    assert max(found["peaks"]) <= known[0]
    shown = figures("schedule", "show", "1f1b", "-p", "2", "--times", path)
    assert shown["by_rank"][1]["peak"] == 0 and shown["peak_bytes"] >= known[0]


def test_one_of_several_pipelines_is_searched(tmp_path: Path) -> None:
    """ "rank 1 has no stage": those of the first pipeline have the ranks 0 and 2."""
    path = tmp_path / "plan.json"
    planned(replicas=2, microbatches=8).save(path)
    assert len(figures("schedule", "search", "--times", path, "-m", "4")["peaks"]) == 2


def test_stages_side_by_side_are_not_searched_as_a_chain(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    notes = {"branches.step_s": "1.0", "no_branches.step_s": "1.0"}
    replace(planned(), notes=notes).save(path)
    assert "are no chain" in bad(2, "schedule", "search", "--times", path, "-m", "4")


def test_no_bound_is_above_the_step() -> None:
    """That of exact search is of times that were rounded to whole numbers."""
    draw = random.Random(1)
    stages = [{**{kind: 1e-4 * draw.random() for kind in "FIW"}, "bytes": 1, "ranks": s} for s in range(2)]
    found = pipeloom.search_schedule({"stage": stages}, microbatches=3)
    assert found.result.ended == "optimal"
    assert found.result.progress.bound.seconds <= found.result.progress.cost_s


def test_a_rank_is_busy_for_no_longer_than_a_step_that_does_not_drain(folder: Path) -> None:
    two = ("--cluster", "2 x cpu")
    good("plan", "mine.py:job", "--weights", "2bw", "-m", "4", *two, "-o", "plan.json")
    step = figures("simulate", "plan.json", "mine.py:job", *two)
    busy = [rank["busy_s"] for rank in step["ranks"]]
    assert 1 - sum(busy) / 2 / step["step_s"] == pytest.approx(step["bubble"])


def test_schedules_with_copies_are_verified(folder: Path) -> None:
    assert figures("verify", "mine.py:job", "--schedule", "po_f", "--chunks", "2", "-m", "4")["passed"]
    assert "--offload-dir" in good("bench", "--help")
