"""`file.py:function` and `package.module:function`."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deep import TANH
from refusals import refused

from pipeloom.ir.errors import BatchError, ConfigError, CutError, PipeloomError
from pipeloom.runtime.batches import loss_shares
from pipeloom.tracer.capture import capture
from pipeloom.tracer.job import load_job

GOOD = """
from pipeloom import Job
import helper_beside

def make():
    return Job(model=helper_beside.model, batch=lambda seed, size: {}, name="loaded")

def needs(width):
    return None

def number():
    return 3

constant = 3

def broken():
    raise RuntimeError("the user's own error")

def deep():
    return broken()

def ends():
    raise SystemExit(3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "pack").mkdir()
    for name in ("jobs_here.py", "json.py", "pack/inner.py"):
        (tmp_path / name).write_text(GOOD)
    (tmp_path / "helper_beside.py").write_text("def model():\n    return None\n")
    (tmp_path / "lacking.py").write_text("import a_module_nobody_has\n")
    (tmp_path / "cut_off.py").write_text("import torch\ndef job(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(sys.modules[name]):  # with the file or folder that it is from
            del sys.modules[name]


def test_from_a_file_and_from_a_module(folder: Path) -> None:
    assert load_job("jobs_here.py:make").name == "loaded"
    assert load_job(f"{folder}/jobs_here.py:make").name == "loaded"
    assert load_job("pack.inner:make").name == "loaded"
    (folder / "alone.py").write_text(f"{GOOD}\njob = make\n")
    assert load_job("alone.py").name == "loaded"
    (folder / "itself.py").write_text(f"{GOOD}\njob = make()\n")
    assert load_job("itself.py").name == "loaded"


def test_a_job_without_a_name_is_called_as_what_it_is_found_by(folder: Path) -> None:
    (folder / "pack" / "small.py").write_text(GOOD.replace('name="loaded"', ""))
    (folder / "small.py").write_text(GOOD.replace('name="loaded"', "") + "\njob = make()\n")
    names = [load_job(spec).name for spec in ("small.py", "small.py:job", "small.py:make", "pack.small:make")]
    assert names == ["small", "small", "small.make", "small.make"]


def test_a_file_may_have_the_name_of_a_library(folder: Path) -> None:
    for file in ("jobs_here.py", "json.py"):  # from the same folder
        assert load_job(f"{file}:make").name == "loaded"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("jobs_here.py", "has no function job"),
        ("jobs_here", "names no function"),
        (":make", "names no function"),
        ("nowhere.py:make", "no file nowhere.py"),
        ("pack.nowhere:make", "no module pack.nowhere"),
        ("nowhere:make", "no module nowhere"),
        ("jobs_here.py:maek", "did you mean make?"),
        ("jobs_here.py:constant", "not a function"),
        ("jobs_here.py:number", "returned an int"),
        ("jobs_here.py:needs", "without arguments"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, spec: str, message: str) -> None:
    assert message in refused(ConfigError, load_job, spec)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("jobs_here.py:broken", RuntimeError, "fails: RuntimeError: the user's own error (jobs_here.py:17)"),
        ("jobs_here.py:deep", RuntimeError, "(jobs_here.py:20, jobs_here.py:17)"),
        ("lacking.py:make", ModuleNotFoundError, "No module named 'a_module_nobody_has' (lacking.py:1)"),
        ("lacking:make", ModuleNotFoundError, "No module named 'a_module_nobody_has' (lacking.py:1)"),
        ("cut_off.py", SyntaxError, "cut_off.py, line 2: SyntaxError: invalid syntax"),
        ("cut_off:job", SyntaxError, "cut_off.py, line 2: SyntaxError: invalid syntax"),
    ],
)
def test_errors_of_the_users_code_are_told_with_their_lines(
    folder: Path, spec: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(spec)
    assert message in str(caught.value)
    assert isinstance(caught.value.__cause__, error)


def fails(*given: object) -> None:
    raise KeyError("the user's own")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"batch": lambda rows: {}}, ConfigError, "Job.batch"),
        ({"batch": fails}, ConfigError, "test_job.py"),
        ({"model": lambda config: torch.nn.Linear(2, 2)}, ConfigError, "'config'"),
        ({"model": fails}, ConfigError, "test_job.py"),
        ({"modules": ["0", "1"]}, CutError, "Job.modules"),
    ],
)
def test_what_does_not_fit_a_job_is_refused(
    given: dict[str, object], error: type[PipeloomError], message: str
) -> None:
    with pytest.raises(error, match=message):
        capture(replace(TANH, **given), 2)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (lambda: 1, ConfigError, "one argument"),
        (fails, ConfigError, "test_job.py"),
        (lambda part: "many", BatchError, "a str"),
        (lambda part: part["x"], BatchError, "a Tensor"),
        (lambda part: -1, BatchError, "-1"),
        (lambda part: 0, BatchError, "no token"),
    ],
)
def test_what_is_no_weight_is_refused(
    weight: Callable[..., object], error: type[PipeloomError], message: str
) -> None:
    with pytest.raises(error, match=message):
        loss_shares([{"x": torch.ones(2)}], weight)


def test_a_job_may_end_the_process(folder: Path) -> None:
    with pytest.raises(SystemExit):
        load_job("jobs_here.py:ends")
