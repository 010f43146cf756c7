"""Whether words are split: what the planner chooses and says, and what such a plan may be used for."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import large_head
import pytest
import torch
from commands import bad, good, run
from large_head import LENGTH, WORDS
from refusals import refused
from runs import capture_of

from pipeloom import Job, plan_split_words, planning
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.ir.plan import Plan, load_plan
from pipeloom.ir.profile import Profile
from pipeloom.plan_request import PlanRequest
from pipeloom.plan_split_words import WHOLE_STEP
from pipeloom.profiler import measure_op
from pipeloom.tracer.captured import Captured

ROWS = 8


@pytest.fixture(scope="module")
def job() -> Job:
    return large_head.job()


def plan(job: Job, **how: object) -> Plan:
    usual = {"ranks": 2, "cluster": "2 x a100-40", "microbatch_size": ROWS}
    return planning.plan(job, **{**usual, "captured": capture_of(job, ROWS)} | how)


def test_a_head_above_the_mean_share_of_a_rank_is_split_if_that_is_faster(job: Job) -> None:
    whole, split, in_three = (plan(job, split_words=words) for words in ("off", "auto", 3))
    assert {*split.split_words} == {*in_three.split_words} == {"head.weight"}
    assert split.predicted_step_s < 0.75 * whole.predicted_step_s
    assert split.predicted_step_s <= in_three.predicted_step_s
    assert float(split.notes[WHOLE_STEP]) == whole.predicted_step_s
    captured = planning.capture(job, ROWS, devices=["a100"], split=split.split_words)
    assert captured.graph.fingerprint == split.graph


@pytest.mark.slow
def test_words_are_split_for_several_lengths_too(job: Job) -> None:
    how = {"lengths": f"{LENGTH // 2}:1,{LENGTH}:1", "planner": "exact"}
    whole, split = (plan(job, split_words=words, **how) for words in ("off", "auto"))
    assert split.split_words and split.predicted_step_s < 0.9 * whole.predicted_step_s


def test_parts_are_measured_where_the_whole_was(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators have the names that their makers gave them, which torch knows as no device."""
    measured_on = []

    def profile(captured: Captured, *, device: str, **_: object) -> Profile:
        measured_on.append(device)
        (costs,) = planning.estimate(captured.graph, find_cluster("a100-40")).values()
        return replace(costs, source="measured", device="Card 80 GB")

    profiled = profile(capture_of(job, ROWS), device="cpu")
    assert not plan(job, profiled=profiled).split_words, "of another device, whose parts cannot be measured"
    monkeypatch.setattr(planning, "profile", profile)
    monkeypatch.setattr(measure_op, "device_name", lambda device: "Card 80 GB")
    assert plan(job, profiled=profiled).split_words
    assert len(measured_on) > 1 and {*measured_on} == {"cpu"}


def test_the_screen_says_in_how_many_parts_and_what_that_gained(tmp_path: Path) -> None:
    file, saved = large_head.__file__, tmp_path / "plan.json"
    words = (f"{file}:job", "--cluster", "2 x a100-40")
    said = run("plan", *words, "--microbatch-size", ROWS, "--no-what-if", "-o", saved).output
    parts = load_plan(saved).split_words["head.weight"]
    assert f"words of head.weight in {parts} parts" in said and "times as fast" in said
    good("simulate", saved, *words)
    assert "split" in bad(1, "export-plan", saved, f"{file}:job", "--for", "torch")


def test_the_number_of_parts_is_guessed_with_as_many_stages_as_are_asked_for(job: Job) -> None:
    refusal = InfeasibleError("too large")
    with patch.object(PlanRequest, "plan", autospec=True, side_effect=refusal) as refuse:
        with pytest.raises(InfeasibleError):
            plan(job, chunks=3)
    tried = [call.args[0].options.schedule for call in refuse.call_args_list]
    assert "interleaved_1f1b:v=3" in tried and plan_split_words.WAVE not in tried


def test_more_ranks_than_ops_are_refused_before_words_are_split(job, monkeypatch):
    monkeypatch.setattr(plan_split_words, "fitting", None)
    said = refused(PlanError, plan, job, ranks=200, cluster="200 x a100-40")
    assert "stages" in said and "at most" in said


def test_a_plan_is_whole_where_words_cannot_be_split(job: Job) -> None:
    muon = replace(job, optimizer=lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]))
    assert not plan(muon).split_words
    assert "rows" in refused(PlanError, plan, muon, split_words=2)
    assert f"at most {WORDS}" in refused(PlanError, plan, job, split_words=WORDS + 1)
