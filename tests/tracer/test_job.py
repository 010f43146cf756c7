"""`file.py:function` and `package.module:function`."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deep import TANH

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
    """A file may have the name of a library; a job without a name is called as what it is found by."""
    (folder / "alone.py").write_text(f"{GOOD}\njob = make\n")
    (folder / "itself.py").write_text(f"{GOOD}\njob = make()\n")
    for spec in ("jobs_here.py:make", "json.py:make", "pack.inner:make", "alone.py", f"{folder}/itself.py"):
        assert load_job(spec).name == "loaded"
    assert sys.modules["json"] is json
    for file in ("pack/small.py", "small.py"):
        (folder / file).write_text(GOOD.replace('name="loaded"', "") + "\njob = make()\n")
    names = [load_job(spec).name for spec in ("small.py", "small.py:job", "small.py:make", "pack.small:make")]
    assert names == ["small", "small", "small.make", "small.make"]


NO_MODULE = "No module named 'a_module_nobody_has' (lacking.py:1)"
CUT_OFF = "cut_off.py, line 2: SyntaxError: invalid syntax"


@pytest.mark.parametrize(
    ("spec", "message", "cause"),
    [
        ("jobs_here.py", "has no function job", None),
        ("jobs_here", "names no function", None),
        (":make", "names no function", None),
        ("nowhere.py:make", "no file nowhere.py", None),
        ("pack.nowhere:make", "no module pack.nowhere", None),
        ("nowhere:make", "no module nowhere", None),
        ("jobs_here.py:maek", "did you mean make?", None),
        ("jobs_here.py:constant", "not a function", None),
        ("jobs_here.py:number", "returned an int", None),
        ("jobs_here.py:needs", "without arguments", None),
        ("jobs_here.py:broken", "fails: RuntimeError: the user's own error (jobs_here.py:17)", RuntimeError),
        ("jobs_here.py:deep", "(jobs_here.py:20, jobs_here.py:17)", RuntimeError),
        ("lacking.py:make", NO_MODULE, ModuleNotFoundError),
        ("lacking:make", NO_MODULE, ModuleNotFoundError),
        ("cut_off.py", CUT_OFF, SyntaxError),
        ("cut_off:job", CUT_OFF, SyntaxError),
    ],
)
def test_what_is_wrong_is_said_with_the_line_of_the_users_code(
    folder: Path, spec: str, message: str, cause: type[Exception] | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(spec)
    assert message in str(caught.value)
    assert isinstance(caught.value.__cause__, cause) if cause else caught.value.hint


def fails(*given: object) -> None:
    raise KeyError("the user's own")


def captured(**given: object) -> object:
    return capture(replace(TANH, **given), 2)


def weighed(weight: Callable[..., object]) -> object:
    return loss_shares([{"x": torch.ones(2)}], weight)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: captured(batch=lambda rows: {}), ConfigError, "Job.batch"),
        (lambda: captured(batch=fails), ConfigError, "test_job.py"),
        (lambda: captured(model=lambda config: torch.nn.Linear(2, 2)), ConfigError, "'config'"),
        (lambda: captured(model=fails), ConfigError, "test_job.py"),
        (lambda: captured(modules=["0", "1"]), CutError, "Job.modules"),
        (lambda: weighed(lambda: 1), ConfigError, "one argument"),
        (lambda: weighed(fails), ConfigError, "test_job.py"),
        (lambda: weighed(lambda part: "many"), BatchError, "a str"),
        (lambda: weighed(lambda part: part["x"]), BatchError, "a Tensor"),
        (lambda: weighed(lambda part: -1), BatchError, "-1"),
        (lambda: weighed(lambda part: 0), BatchError, "no token"),
    ],
)
def test_what_does_not_fit_a_job_is_refused(
    made: Callable[[], object], error: type[PipeloomError], message: str
) -> None:
    with pytest.raises(error, match=message):
        made()


def test_a_job_may_end_the_process(folder: Path) -> None:
    with pytest.raises(SystemExit):
        load_job("jobs_here.py:ends")
