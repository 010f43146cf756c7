"""A run: its config and plan, what its ranks are handed, how it is resumed, and how it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import good
from runs import even_plan
from tiny_run import lines

from pipeloom.ir.errors import ConfigError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan
from pipeloom.train.config import Config, PipelineConfig, unused_keys, write_config
from pipeloom.train.loop import TrainOutcome
from pipeloom.train.rank_processes import RankProcesses
from pipeloom.train.report import RunReport
from pipeloom.train.run import (
    TrainRequest,
    decide,
    follow_plan,
    prepare_run,
    refuse_unused,
    run,
    with_caps,
)
from pipeloom.train.run_directory import has_report
from pipeloom.train.workload import Workload

MODULE = sys.modules[run.__module__]
REPORT = ("summary.json", "report.html", "trace.json")


def refuse_to_export(*_: object, **__: object) -> None:
    raise AssertionError("a rank exported the model again")


def launch_here(rank: Callable[..., None], ranks: int, *, args: tuple[Any, ...]) -> int:
    """One rank, in this process, in which nothing can be exported."""
    assert ranks == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.export, "export", refuse_to_export)
        for of_ranks in ("pipeline.capture", "rank_stages.capture", "rank_stages.capture_evaluation"):
            patch.setattr(f"pipeloom.{of_ranks}", refuse_to_export)  # an earlier result is no excuse
        rank(*args)
    return 0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks run in this process, and rehearse in no time."""
    monkeypatch.setattr("pipeloom.train.rank_processes.launch", launch_here)
    monkeypatch.setattr("pipeloom.forecast.ENOUGH_S", 0.0)


@pytest.fixture
def start(here: None, tiny: Config, tmp_path: Path) -> Callable[..., int]:
    """Trains for two steps on one rank."""
    config = replace(tiny, steps=2, pipeline=replace(tiny.pipeline, ranks=1))
    (tmp_path / "config.toml").write_text(write_config(config))

    def start(*overrides: str, resume: bool = False, **more: Any) -> int:
        file = None if resume else tmp_path / "config.toml"
        request = TrainRequest(file=file, out=tmp_path / "a", overrides=overrides, resume=resume, **more)
        return run(request, RankProcesses())

    return start


def one_stage(config: Config, workload: Workload, console: object) -> tuple[Plan, None]:
    return even_plan(workload.job, 1, microbatches=config.pipeline.microbatches), None


def test_a_rank_trains_and_validates_what_it_was_handed_and_says_what_nobody_asked_for(
    start: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        return " ".join(capsys.readouterr().err.split())

    unasked = "before the first step the ranks rehearse one, which the forecast is made of"
    assert start(as_json=True) == 0
    assert f"{unasked}, and the model is validated as it begins" in said()
    # Going on plans nothing, and captures once all the same.
    assert start("steps=3", resume=True, as_json=True) == 0
    assert unasked in (text := said()) and "validated as it begins" not in text


@pytest.mark.slow
def test_a_long_step_comes_first_and_nothing_else_runs(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    walks: list[int] = []
    monkeypatch.setattr("pipeloom.runtime.rehearsal.Rehearsal.time_actions", walks.append)
    monkeypatch.setattr("pipeloom.train.loop.LONG_STEP_S", 0.0)
    assert start(as_json=True) == 0
    written = lines(tmp_path / "a")
    assert walks == [] and [line["step"] for line in written] == [1, 2] and written[-1]["validation_loss"] > 0
    figures = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert figures["forecast"]["step_s"] > 0
    assert "rehearses none, the forecast is the plan's" in " ".join(capsys.readouterr().err.split())


def test_bench_does_what_was_asked_for(here: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step is one step: no rehearsals, and the line says where the prediction is from."""

    rehearse = "pipeloom.runtime.rehearsal.Rehearsal.time_actions"
    monkeypatch.setattr(rehearse, lambda *_, **__: pytest.fail("a step that nobody asked for was run"))
    monkeypatch.setattr("pipeloom.train.rank_processes.StartedRanks", lambda *_, **__: nullcontext(Mock()))
    words = ("--ranks", "1", "-m", "2", "--microbatch-size", "2", "--steps", "1", "--warmup", "0")
    printed = good("bench", "mine.py:words", *words)
    assert "(median of 1)" in printed and "by the plan's profile" in printed


def test_a_run_is_planned_by_the_planner_of_its_config(tiny: Config, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(write_config(replace(tiny, model=replace(tiny.model, layers=2))))

    def planned(*overrides: str) -> Plan:
        request = TrainRequest(file=file, overrides=overrides)
        ready = prepare_run(request, tmp_path / "run", RankProcesses())
        assert ready is not None and not (tmp_path / "run").exists()
        return ready.plan

    plan = planned("pipeline.planner=balanced")
    assert plan.planner == "balanced"
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="pipeline.planner is to be probe, but the plan"):
        planned(f"pipeline.plan={tmp_path / 'plan.json'}", "pipeline.planner=probe")


@pytest.fixture
def plan(tiny: Config) -> Plan:
    return one_stage(tiny, MODULE.workload_of(tiny), None)[0]


def test_a_plan_decides_whether_its_stages_are_compiled(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    """Its times and its memory are those of one or the other."""
    compiled = replace(plan, notes={"compiled": "forwards 0.50 times as long as eager"})
    on = Config(pipeline=PipelineConfig(compile=True, plan="p.json"))
    assert follow_plan(Config(), compiled, ()).pipeline.compile
    assert follow_plan(on, compiled, ("pipeline.compile=true",)).pipeline.compile
    with pytest.raises(ConfigError, match="pipeline.compile is to be False"):
        follow_plan(Config(), compiled, ("pipeline.compile=false",))
    assert "eager stages" not in caplog.text
    with caplog.at_level(logging.WARNING, logger="pipeloom"):
        assert follow_plan(on, plan, ()).pipeline.compile
    assert "p.json was made with the times and the memory of eager stages" in caplog.text


def test_a_plan_decides_what_is_done_with_residuals_and_leaves_nothing_to_plan(plan: Plan) -> None:
    recomputed = replace(plan, memory=MemoryPolicy(stages=({"a": "recompute", "b": "keep"},)))
    assert follow_plan(Config(), recomputed, ()).pipeline.treatments is None
    kept = Config(pipeline=PipelineConfig(treatments="none"))
    assert follow_plan(kept, recomputed, ()).pipeline.treatments == "recompute"
    with pytest.raises(ConfigError, match="treatments is to be none"):
        follow_plan(kept, recomputed, ("pipeline.treatments=none",))
    coarse = Config(pipeline=PipelineConfig(granularity="module"))
    with pytest.raises(ConfigError, match="granularity"):
        follow_plan(coarse, plan, ("pipeline.granularity=module",))
    for changed in (coarse, Config(replan=2)):
        assert follow_plan(changed, plan, ()).pipeline.granularity == changed.pipeline.granularity
    assert follow_plan(Config(pipeline=PipelineConfig(master_weights=True)), plan, ()).plan_settings.clips


def test_names_that_nothing_can_be_planned_by_do_not_get_into_the_config(plan: Plan) -> None:
    """A run that followed such a plan could not be resumed with other micro-batches and no plan."""
    before = Config(pipeline=PipelineConfig(planner="probe", schedule="gpipe"))
    for planner, schedule, expected in (
        ("by hand", "searched", ("probe", "gpipe")),
        ("balanced", "interleaved:v=3", ("balanced", "interleaved:v=3")),
        ("balanced", "mine.py:zigzag", ("balanced", "gpipe")),  # a file that is not there, and not looked for
    ):
        settings = follow_plan(before, replace(plan, planner=planner, schedule=schedule), ()).pipeline
        assert (settings.planner, settings.schedule) == expected


def test_a_cap_beside_a_plan_file_is_the_lower_one(plan: Plan) -> None:
    given = replace(plan, caps=(300 * 1024,))
    assert with_caps(given, None).caps == given.caps
    assert with_caps(given, "200KiB").caps == with_caps(replace(given, caps=()), "200KiB").caps == (204800,)
    assert with_caps(given, "9TiB").caps == given.caps


NOT_PLANNED_BY = ("pipeline.offload_dir=x", "pipeline.compile=true", "optimizer.learning_rate=0.5")
PLANNED_BY = "ranks=1 schedule=gpipe microbatches=4 microbatch_size=4 memory=1GiB split_backward=true"
PLANNED_BY += " autocast=bfloat16 device=cuda"


@pytest.mark.parametrize(
    "setting", [*NOT_PLANNED_BY, "model.layers=2", *(f"pipeline.{each}" for each in PLANNED_BY.split())]
)
def test_a_resumed_run_is_planned_anew_for_what_planning_reads(
    tiny: Config, plan: Plan, tmp_path: Path, setting: str
) -> None:
    (tmp_path / "config.toml").write_text(write_config(tiny))
    plan.save(tmp_path / "plan.json")
    request = TrainRequest(resume=True, overrides=("steps=20", setting))
    config, kept = decide(request, tmp_path)
    assert config.steps == 20 and config != replace(tiny, steps=20)
    assert kept == (plan if setting in NOT_PLANNED_BY else None)


@pytest.mark.parametrize("override", ["data.paths=a.txt", "model.width=64", "optimizer.name=adamw"])
def test_what_a_job_of_ones_own_does_not_use_is_refused(override: str) -> None:
    own, own_optimizer = Config(job="mine.py:job"), override.startswith("optimizer")
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        refuse_unused((override,), own, own_optimizer=own_optimizer)
    refuse_unused(("steps=3", "optimizer.warmup_steps=3"), own, own_optimizer=own_optimizer)
    refuse_unused((override,), Config(), own_optimizer=False)


def test_under_torchrun_a_resumed_run_meets_as_its_own_config_says(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = replace(tiny.pipeline, device="cpu", timeout_s=1800.0)
    (tmp_path / "config.toml").write_text(write_config(replace(tiny, pipeline=pipeline)))
    asked: list[object] = []

    def connect(device: torch.device, *, timeout_s: float) -> None:
        asked.extend((device, timeout_s))
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(MODULE, "connect", connect)
    with pytest.raises(KeyboardInterrupt):
        run(TrainRequest(out=tmp_path, resume=True), RankProcesses())
    assert asked == [torch.device("cpu"), 1800.0]


def test_a_run_that_has_ended_says_so_or_gets_the_report_that_it_lacks(
    start: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"
    assert start() == 0
    for name in REPORT:
        (out / name).unlink()
    capsys.readouterr()
    assert start(resume=True) == 0
    assert f"{out} goes on from step 2" in capsys.readouterr().out.replace("\n", "")
    assert [line["step"] for line in lines(out)] == [0, 1, 2]
    figures = json.loads((out / "summary.json").read_text())
    assert (figures["steps"], figures["first_step"], figures["measured"]) == (2, 2, None)
    assert all(figures["train_loss"]) and all((out / name).is_file() for name in REPORT)
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    capsys.readouterr()
    assert start(resume=True, as_json=True) == 0
    said = capsys.readouterr()
    assert "is finished: 2 steps" in said.err
    assert json.loads(said.out) == figures
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


def test_a_start_that_goes_on_with_another_plan_began_where_it_began(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_by = MODULE._train_by

    def switches(prepared: Any, *more: Any) -> Any:
        if more[-1] is not None:
            return train_by(prepared, *more)
        train_by(replace(prepared, config=replace(prepared.config, steps=1)), *more)
        return Mock(plan=prepared.plan)

    monkeypatch.setattr(MODULE, "_train_by", switches)
    assert start() == 0
    figures = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (figures["first_step"], figures["steps"]) == (0, 2)


def test_a_validation_loss_that_is_no_number_is_text_in_json(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("pipeloom.train.loop.validate", lambda *_: float("nan"))
    assert start(as_json=True) == 0
    figures = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert figures["validation_loss"] == ["nan", "nan"]
    assert has_report(tmp_path / "a", 2)


@pytest.mark.slow
def test_the_report_of_fewer_steps_is_none(start: Callable[..., int], tmp_path: Path) -> None:
    summary = tmp_path / "a" / "summary.json"
    assert start() == 0
    before = summary.read_text()
    assert start("steps=4", resume=True) == 0
    summary.write_text(before)  # killed before the new one was written
    assert start(resume=True) == 0
    assert [line["step"] for line in lines(tmp_path / "a")] == [0, 1, 2, 3, 4]
    assert json.loads(summary.read_text())["steps"] == 4


def test_a_report_says_which_steps_it_is_of_and_the_settings_that_the_job_uses() -> None:
    parts = {"out": Path(), "plan": Mock(), "graph": Mock(), "forecast": Mock()}
    unused = unused_keys(Config(job="mine.py"), own_optimizer=True)
    for first, told in ((0, ""), (60, "resumed at step 60"), (70, "")):
        outcome = TrainOutcome(first_step=first, steps=70, losses={}, timeline=None)
        report = RunReport(config=Config(job="mine.py"), unused=unused, outcome=outcome, **parts)
        assert report.since.startswith(told) and bool(report.since) == bool(told)
    assert {"model.width", "optimizer.name", "steps", "job"} & report.settings.keys() == {"steps", "job"}


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_resume_that_cannot_begin_changes_nothing(
    start: Callable[..., int], tmp_path: Path, change_text: Callable[[], object]
) -> None:
    assert start() == 0
    change_text()
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match="is of other data"):
        start("steps=9", "pipeline.microbatches=4", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("ends_by", [KeyboardInterrupt, SystemExit])
def test_however_it_is_ended_it_says_how_far_it_is(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, ends_by: type
) -> None:
    def launch(*_: object, **__: object) -> int:
        raise ends_by(143)

    def impatient(out: Path) -> str:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return "kept"

    monkeypatch.setattr("pipeloom.train.rank_processes.launch", launch)
    monkeypatch.setattr(MODULE, "make_plan", one_stage)
    monkeypatch.setattr(MODULE, "interrupted", impatient)
    with pytest.raises(ends_by):
        start()
    assert capsys.readouterr().err == "kept\n"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kept", [False, True], ids=["at once", "behind a checkpoint"])
def test_a_run_that_fails_says_how_far_it_is_kept_if_it_got_further(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, kept: bool
) -> None:
    def launch(*of_ranks: Any, **more: Any) -> int:
        return launch_here(*of_ranks, **more) + 1 if kept else 1

    monkeypatch.setattr("pipeloom.train.rank_processes.launch", launch)
    for steps in (2, 3):
        assert start(f"steps={steps}", resume=kept and steps > 2) == 1
        said = capsys.readouterr().err
        assert (f"{tmp_path / 'a'} is kept up to step {steps}: go on with --resume" in said) == kept


def test_a_resumed_run_that_is_refused_is_not_to_be_resumed_again(
    start: Callable[..., int], monkeypatch, capsys
):
    assert start() == 0
    monkeypatch.setattr("pipeloom.train.rank_processes.launch", lambda *_, **__: 1)
    capsys.readouterr()
    assert start("steps=4", resume=True) == 1
    assert "go on with" not in capsys.readouterr().err
