"""Slips in calls and on the command line: they ended in a traceback or in another library's error, or went on
as if nothing were wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import bad, good
from plain_net import two_linears
from refusals import refused

from pipeloom import (
    Options,
    Pipeline,
    PipeloomError,
    Plan,
    PlanSettings,
    capture,
    load_plan,
    plan,
    profile,
    search_schedule,
)
from pipeloom.clusters.files import save_cluster
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.errors import BatchError, CaptureError, ConfigError, PlanError
from pipeloom.plan_request import PlanRequest
from pipeloom.tracer.job import load_job

ROWS = 4
STAGES = {"stage": [{"F": 1, "B": 2, "ranks": rank} for rank in range(2)]}


def plan_of(**how: Any) -> Plan:
    """Of the small job, changed so, for one rank."""
    job = replace(two_linears(), **how)
    return plan(job, ranks=1, microbatches=2, microbatch_size=ROWS, cluster="1 x cpu")


def pipeline_of(device: str = "cpu", **how: Any) -> Pipeline:
    return Pipeline(two_linears(), replace(plan_of(), **how), options=Options(device=device))


def step_without_tensors() -> float:
    with pipeline_of() as pipeline:
        return pipeline.step({})


def pipeline_alone(**how: Any) -> Pipeline:
    return Pipeline(replace(two_linears(), **how), microbatches=2, microbatch_size=ROWS, compare=False)


@pytest.mark.parametrize(
    ("slip", "error", "word"),
    [
        (lambda: capture(two_linears(), 0), CaptureError, "microbatch_size is 0"),
        (lambda: plan(two_linears(), schedule="interleaved", chunks=0), ConfigError, "chunks is 0"),
        (lambda: search_schedule(STAGES, 4, shortest="day"), ConfigError, "shortest='day'"),
        (lambda: profile(capture(two_linears(), 2), device="tpu"), ConfigError, "'tpu'"),
        (lambda: pipeline_of("cuda:99"), ConfigError, "'cuda:99'"),
        (lambda: plan_of(batch=lambda *_: torch.ones(ROWS, 8)), CaptureError, "Tensor, not a dictionary"),
        (step_without_tensors, BatchError, "no tensors"),
        (lambda: plan_of(batch=lambda *_: two_linears().batch(0, 3)), CaptureError, "batch"),
        (lambda: pipeline_alone(model=two_linears().model()), CaptureError, "a function"),
        (lambda: pipeline_of(delay_correction=0.3), ConfigError, "delay_correction"),
        (lambda: Options(seed="a"), ConfigError, "seed"),
        (lambda: Options(compile="no"), ConfigError, "compile"),
        (lambda: PlanSettings(treatments=3), ConfigError, "treatments"),
        (lambda: pipeline_alone(optimizer=lambda parameters: None), PlanError, "None"),
    ],
)
def test_slips_in_calls(slip: Callable[[], object], error: type[PipeloomError], word: str) -> None:
    assert word in refused(error, slip)


def test_paths_and_clusters_may_be_text(tmp_path: Path) -> None:
    job, path, kept = two_linears(), f"{tmp_path}/plan.json", f"{tmp_path}/checkpoints"
    made = plan_of()
    made.save(path)
    assert load_plan(path) == made
    with Pipeline(job, path) as pipeline:
        pipeline.step(job.batch(0, 2 * ROWS))
        pipeline.save(kept, extra={"at": 1})
        assert pipeline.load(kept) == {"at": 1}
        assert "keep" in refused(ConfigError, pipeline.save, tmp_path / "none", keep=0)
        assert not list(tmp_path.glob("none/*"))
    save_cluster(find_cluster("2 x a100-40"), tmp_path / "two.toml")
    assert plan(job, ranks=2, microbatch_size=2, cluster=tmp_path / "two.toml").stages


def test_modules_may_have_names_that_are_no_identifiers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("01-mine.py").write_text("from plain_net import two_linears\n")
    assert load_job("01-mine:two_linears").batch is not None


def test_a_plan_is_there_before_what_if_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanRequest, "changes", Mock(side_effect=KeyboardInterrupt))
    bad(130, "plan", "mine.py:job", "--cluster", "2 x a100-40", "-o", "plan.json")
    assert (folder / "plan.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("profile", "mine.py:job", "--cluster", "2 x a100-40", "--save", "mine.py"),
        ("simulate", "plan.json", "mine.py:job", "--html", "plan.json"),
        ("simulate", "plan.json", "mine.py:job", "--html", "new", "--trace", "./new"),
        ("schedule", "check", "rows.txt", "--html", "rows.txt"),
    ],
)
def test_no_command_writes_over_what_it_reads(folder: Path, words: tuple[str, ...]) -> None:
    for name in ("plan.json", "rows.txt"):
        (folder / name).write_text("0F0 0B0\n")

    def texts() -> dict[Path, str]:
        return {file: file.read_text() for file in folder.iterdir() if file.is_file()}

    before = texts()
    assert "written over" in bad(2, *words)
    assert texts() == before


def test_files_may_begin_with_a_mark_and_operations_are_python(folder: Path) -> None:
    (folder / "rows.csv").write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert "2 actions" in good("schedule", "check", "rows.csv")
    assert "Python" in bad(2, "schedule", "check", "rows.csv", "--operations", "cluster.toml")
    (folder / "none.py").write_text("")
    assert "operation" in bad(2, "schedule", "check", "rows.csv", "--operations", "none.py")
    (folder / "stages.toml").write_text(f"[[stage]]\nF = 1{'0' * 400}\nB = 2\nranks = 0\n")
    assert "1e+30" in bad(2, "schedule", "search", "stages.toml")


def test_the_model_and_the_devices_of_a_simulation_are_asked_for(folder: Path) -> None:
    good("plan", "mine.py:job", "--cluster", "2 x a100-40", "-o", "plan.json")
    assert "MODEL" in bad(2, "simulate", "plan.json")
    good("profile", "mine.py:job", "--cluster", "2 x a100-40", "--save", "profile.json")
    assert "--cluster" in bad(2, "simulate", "plan.json", "mine.py:job", "--profile", "profile.json")
    (folder / "plan.json").rename(folder / "mine.plan")
    assert "MODEL" in bad(2, "studio", "mine.plan", "--cluster", "2 x a100-40")
    assert "2 devices" in bad(1, "studio", "mine.plan", "mine.py:job", "--cluster", "1 x a100-40")
