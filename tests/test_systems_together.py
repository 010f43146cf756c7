"""What two of the systems did together: a plan of one, read, searched, drawn or run by another."""

from dataclasses import replace
from pathlib import Path

import nets
import pytest
from commands import bad, figures, good

import pipeloom
from pipeloom.ir.plan import Plan
from pipeloom.schedules.scenario import Scenario, load_work, simulate_schedule

MIB = 1 << 20


def planned(**how: object) -> Plan:
    """Of two stages, on devices described by figures."""
    how = {"ranks": 2, "microbatches": 4, "microbatch_size": 2} | how
    ranks = int(str(how["ranks"])) * int(str(how.get("replicas", 1)))
    return pipeloom.plan(nets.job("skips"), cluster=f"{ranks} x cpu", **how)  # type: ignore[arg-type]


def test_residuals_pipelines_and_branches_of_a_plan_are_those_of_its_search(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    search = ("schedule", "search", "--times", path, "-m", "4")
    plan = planned()
    # A stage without residuals does not hide those of others.
    stages = [
        replace(stage, kept_bytes=0, memory=replace(stage.memory, residuals=size))
        for stage, size in zip(plan.stages, (MIB, 0), strict=True)
    ]
    replace(plan, stages=tuple(stages)).save(path)
    known = load_work(path).residual_bytes
    assert known[0] > 0 == known[1]
    found = figures(*search, "--memory", f"{known[0] / 1024}KiB")  # of one micro-batch
    assert max(found["peaks"]) <= known[0]
    shown = figures("schedule", "show", "1f1b", "-p", "2", "--times", path)
    assert shown["by_rank"][1]["peak"] == 0 and shown["peak_bytes"] >= known[0]
    # Of several pipelines the first has the ranks 0 and 2; stages side by side are no chain.
    planned(replicas=2, microbatches=8).save(path)
    assert len(figures(*search)["peaks"]) == 2
    replace(plan, notes={"branches.step_s": "1.0", "no_branches.step_s": "1.0"}).save(path)
    assert "no chain" in bad(2, *search)


def test_times_of_a_plan_have_what_it_recomputes_and_sizes_what_it_offloads(tmp_path: Path) -> None:
    plan = planned()
    treated = (
        replace(plan.stages[0], recompute_s=1.0),
        replace(plan.stages[1], kept_bytes=MIB, offloaded_bytes=3 * MIB),
    )
    path = tmp_path / "plan.json"
    replace(plan, stages=treated).save(path)
    known = load_work(path)
    assert known.input_grad_s == (1.0 + plan.stages[0].input_grad_s, plan.stages[1].input_grad_s)
    assert known.residual_bytes[1] == 4 * MIB
    assert figures("schedule", "search", "--times", path, "-m", "4")["step_s"] > 4.0


def test_residuals_are_those_at_their_highest_though_messages_are_longer(tmp_path: Path) -> None:
    planned().save(tmp_path / "plan.json")
    scenario = Scenario(times=load_work(tmp_path / "plan.json"), transfer_s=0.001, per_node=1)
    found = simulate_schedule("zb_h2", scenario)
    assert found.peaks_bytes == found.timeline.residual_peaks


def test_a_rank_is_busy_for_no_longer_than_a_step_that_does_not_drain(folder: Path) -> None:
    two = ("--cluster", "2 x cpu")
    good("plan", "mine.py:job", "--weights", "2bw", "-m", "4", *two, "-o", "plan.json")
    step = figures("simulate", "plan.json", "mine.py:job", *two)
    busy = [rank["busy_s"] for rank in step["ranks"]]
    assert 1 - sum(busy) / 2 / step["step_s"] == pytest.approx(step["bubble"])


def test_schedules_with_copies_are_verified(folder: Path) -> None:
    assert figures("verify", "mine.py:job", "--schedule", "po_f", "--chunks", "2", "-m", "4")["passed"]
