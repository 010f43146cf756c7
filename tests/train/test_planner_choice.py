"""`pipeline.planner` of a run, which was always `exact`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from compiled import KnownRatios

from pipeloom.ir.errors import ConfigError, PlanError
from pipeloom.ir.plan import Plan, load_plan
from pipeloom.train.config import Config, PipelineConfig
from pipeloom.train.config_text import write_config
from pipeloom.train.follow_plan import follow_plan
from pipeloom.train.rank_processes import RankProcesses
from pipeloom.train.run import TrainRequest, prepare_run


@pytest.fixture
def file(tiny: Config, tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(write_config(replace(tiny, model=replace(tiny.model, layers=2))))
    return tmp_path / "config.toml"


def planned(file: Path, out: Path, *overrides: str) -> Plan:
    prepare_run(TrainRequest(file=file, out=out, overrides=overrides), RankProcesses())
    return load_plan(out / "plan.json")


def test_a_run_is_planned_by_the_planner_of_its_config(file: Path, tmp_path: Path) -> None:
    plan = planned(file, tmp_path / "run", "pipeline.planner=balanced")
    assert plan.planner == "balanced"
    plan.save(tmp_path / "plan.json")
    follows = (f"pipeline.plan={tmp_path / 'plan.json'}", "pipeline.planner=probe")
    with pytest.raises(ConfigError, match="pipeline.planner is to be probe, but the plan"):
        planned(file, tmp_path / "other", *follows)


def test_an_unknown_planner_is_refused_before_any_work(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeloom.planning.capture", lambda *_, **__: pytest.fail("it was captured"))
    with pytest.raises(PlanError, match="no planner is named 'exat'") as caught:
        prepare_run(
            TrainRequest(file=file, out=tmp_path / "run", overrides=("pipeline.planner=exat",)),
            RankProcesses(),
        )
    assert "did you mean exact?" in caught.value.hint


def test_a_run_that_compiles_is_planned_with_compiled_times(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeloom.profiler.compiled_pieces.measure_piece", KnownRatios())
    for compile in ("true", "false"):
        out = tmp_path / compile
        prepare_run(
            TrainRequest(file=file, out=out, overrides=(f"pipeline.compile={compile}",)), RankProcesses()
        )
        notes = load_plan(out / "plan.json").notes
        said = " ".join(capsys.readouterr().out.split())
        if compile == "true":
            how = "forwards 0.50 and backwards 3.00 times as long as eager"
            assert notes == {"compiled": how} and f"times of compiled functions: {how}" in said
        else:
            assert not notes and "compiled" not in said


def test_a_plan_decides_whether_its_stages_are_compiled(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its times and its memory are those of one or the other."""
    planned(file, tmp_path / "run")
    eager = load_plan(tmp_path / "run" / "plan.json")
    compiled = replace(eager, notes={"compiled": "forwards 0.50 times as long as eager"})
    on = Config(pipeline=PipelineConfig(compile=True, plan="p.json"))
    assert follow_plan(Config(), compiled, ()).pipeline.compile
    assert follow_plan(on, compiled, ("pipeline.compile=true",)).pipeline.compile
    with pytest.raises(ConfigError, match="pipeline.compile is to be False, but the plan None has True"):
        follow_plan(Config(), compiled, ("pipeline.compile=false",))
    assert "eager stages" not in caplog.text
    with caplog.at_level(logging.WARNING, logger="pipeloom"):
        assert follow_plan(on, eager, ()).pipeline.compile
    assert "p.json was made with the times and the memory of eager stages" in caplog.text


def test_names_that_nothing_can_be_planned_by_do_not_get_into_the_config(file: Path, tmp_path: Path) -> None:
    """A run that followed such a plan could not be resumed with other micro-batches and no plan."""
    planned(file, tmp_path / "run")
    plan = replace(load_plan(tmp_path / "run" / "plan.json"), planner="by hand", schedule="searched")
    before = Config(pipeline=PipelineConfig(planner="probe", schedule="gpipe"))
    settings = follow_plan(before, plan, ()).pipeline
    assert (settings.planner, settings.schedule) == ("probe", "gpipe")
    named = replace(plan, planner="balanced", schedule="interleaved:v=3")
    settings = follow_plan(before, named, ()).pipeline
    assert (settings.planner, settings.schedule) == ("balanced", "interleaved:v=3")
    own = replace(plan, schedule="mine.py:zigzag")  # a file that is not there, and is not looked for
    assert follow_plan(before, own, ()).pipeline.schedule == "gpipe"
