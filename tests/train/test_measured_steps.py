"""`pipeloom plan` for this machine says what its ranks rehearse, not what ops add up to that ran alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from commands import figures, good
from compiled import KnownRatios
from tests.support import nets

from pipeloom import Pipeline, plan as plan_job
from pipeloom.commands.plan import reported
from pipeloom.ir.plan import load_plan
from pipeloom.ir.text import parse_bytes
from pipeloom.plan_settings import PlanSettings
from pipeloom.planning import make_request, plan_size
from pipeloom.step_reports import StepReport
from pipeloom.train.loop import LONG_STEP_S
from pipeloom.train.measured_steps import why_not_rehearsed


@pytest.fixture
def quick(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No process is started, and a rehearsal is one walk."""
    monkeypatch.setattr("pipeloom.train.rank_processes.StartedRanks", lambda *_, **__: nullcontext(Mock()))
    monkeypatch.setattr("pipeloom.forecast.ENOUGH_S", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    return folder


PLAN = ("plan", "mine.py:job", "-p", "1", "-m", "2", "--no-what-if")


def said(*words: str) -> str:
    return " ".join(good(*PLAN, *words).split())


def rank_here(rank: Any, ranks: int, *, args: tuple[Any, ...]) -> int:
    """The only rank, in this process."""
    assert ranks == 1
    rank(*args)
    return 0


def test_a_plan_for_this_machine_is_rehearsed(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.train.rank_processes.launch", rank_here)
    planned = figures(*PLAN, "-o", "plan.json")
    assert planned["predicted_by"] == "rehearsal" and planned["not_rehearsed"] is None
    assert planned["predicted_step_s"] != planned["profiled_step_s"]
    assert min(planned["predicted_step_s"], planned["profiled_step_s"]) > 0
    assert load_plan(quick / "plan.json").predicted_step_s == planned["profiled_step_s"]
    assert "as its ranks rehearsed it here" in said()
    # What 10 % more of something would make stands beside the plan's own step, and is on its scale.
    planned = figures(*PLAN, "--what-if")
    assert planned["what_if"]
    for change in planned["what_if"]:
        gained = 1 - change["step_s"] / planned["predicted_step_s"]
        assert gained == pytest.approx(change["gain"], abs=1e-9)


def test_steps_of_a_plan_for_clipped_gradients_clip_them(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeloom.train.rank_processes.launch", rank_here)
    clipped: list[bool] = []
    steps = Pipeline.steps

    def watched(pipeline: Pipeline, batches: object) -> Iterator[StepReport]:
        for report in steps(pipeline, batches):
            clipped.append(report.grad_norm is not None)
            yield report

    monkeypatch.setattr(Pipeline, "steps", watched)
    words = ("bench", "mine.py:job", "-p", "1", "-m", "2", "--planner", "exact", "--steps", "1")
    words += ("--warmup", "0")
    good(*words)
    good(*words, "--clips")
    assert clipped == [False, True]


def test_a_plan_for_compiled_stages_says_so_and_is_rehearsed_compiled(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeloom.profiler.compiled_pieces.measure_piece", KnownRatios())
    seen: list[bool] = []

    def rank(ranks_do: Any, ranks: int, *, args: tuple[Any, ...]) -> int:
        seen.append(any(each.compile for each in args if isinstance(each, PlanSettings)))
        eager = [each.changed(compile=False) if isinstance(each, PlanSettings) else each for each in args]
        return rank_here(ranks_do, ranks, args=tuple(eager))

    monkeypatch.setattr("pipeloom.train.rank_processes.launch", rank)
    how = "forwards 0.50 and backwards 3.00 times as long as eager"
    assert f"times of compiled functions: {how}" in said("--compile", "-o", "plan.json")
    assert load_plan(quick / "plan.json").notes["compiled"] == how
    assert figures(*PLAN, "--compile")["compiled"] == how
    assert figures(*PLAN)["compiled"] is None
    assert seen == [True, True, False]


@pytest.mark.parametrize(
    ("words", "source", "why"),
    [
        (["--no-rehearse"], "profile", None),
        (["--cluster", "1 x cpu"], "roofline", None),
        ([], "profile", "its ranks ended with exit status 137"),
    ],
    ids=["not asked for", "elsewhere", "killed"],
)
def test_a_plan_says_why_it_is_not_rehearsed(
    quick: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], source: str, why: str | None
) -> None:
    launched = Mock(return_value=137)
    monkeypatch.setattr("pipeloom.train.rank_processes.launch", launched)
    planned = figures(*PLAN, *words, "-o", "plan.json")
    assert planned["predicted_by"] == source and launched.called == (why is not None)
    assert planned["predicted_step_s"] == planned["profiled_step_s"]
    assert why in (None, planned["not_rehearsed"]) and (quick / "plan.json").is_file()
    assert f"not rehearsed: {planned['not_rehearsed']}" in said(*words)


def test_what_branches_gain_is_told_of_the_rehearsed_step_and_the_gap_to_the_bound_of_ops_alone() -> None:
    """What branches gain is as much longer as the step itself; the bound knows nothing of what ranks do
    between ops."""
    notes = {"search.bound_s": "0.16", "search.ended": "converged"}
    for what, step_s in (("branches", "0.2"), ("no_branches", "0.3")):
        notes |= {f"{what}.step_s": step_s, f"{what}.depth": "3", f"{what}.peak_bytes": "5"}
    simulated = plan_job(nets.job("skips"), ranks=1, microbatches=2, microbatch_size=2, cluster="1 x cpu")
    plan = replace(simulated, predicted_step_s=0.2, notes=notes)
    told = reported(plan, [], proof=None, times="profile", rehearsed_s=0.5)
    assert (told["predicted_step_s"], told["profiled_step_s"]) == (0.5, 0.2)
    assert told["branches"]["branches"]["step_s"] == pytest.approx(0.5)
    assert told["branches"]["no_branches"] == {"step_s": pytest.approx(0.75), "depth": 3, "peak_bytes": 5}
    assert told["search"]["gap"] == pytest.approx(0.25)
    assert told["limits"][-1].endswith("the gap is 25.0%")


def test_what_would_take_long_or_much_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    request = make_request(ranks=1, microbatches=2, microbatch_size=2)
    made, _ = plan_size(request, nets.job("skips"))
    assert why_not_rehearsed(request, made) == ""
    for plan, word in (
        (replace(made, predicted_step_s=2 * LONG_STEP_S), "as long as a few steps"),
        (replace(made, peaks=(parse_bytes("900TiB"),)), "its ranks need 900"),
        (replace(made, schedule_rows=("0F0 0F1",)), "no backwards"),
    ):
        assert word in why_not_rehearsed(request, plan)
    assert "10000 ranks" in why_not_rehearsed(request.changed(replicas=10_000), made)
    monkeypatch.setenv("RANK", "0")
    assert "one of several ranks" in why_not_rehearsed(request, made)


@pytest.mark.slow
def test_two_ranks_rehearse_the_plan(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    planned = figures("plan", "mine.py:job", "-p", "2", "-m", "4")
    assert planned["predicted_by"] == "rehearsal" and planned["predicted_step_s"] > 0
    assert capfd.readouterr().err == ""
