"""`file.py:function` and `package.module:function`."""

import json
import sys
from pathlib import Path

import pytest

from pipeloom.ir.errors import ConfigError
from pipeloom.tracer.job_loader import load_job

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
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "jobs_here.py").write_text(GOOD)
    (tmp_path / "helper_beside.py").write_text("def model():\n    return None\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "inner.py").write_text(GOOD)
    (tmp_path / "json.py").write_text(GOOD)
    (tmp_path / "lacking.py").write_text("import a_module_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) or name == "pack":
            file = getattr(sys.modules[name], "__file__", None) or str(tmp_path)
            if file.startswith(str(tmp_path)):
                del sys.modules[name]


def test_from_a_file_and_from_a_module(folder: Path) -> None:
    assert load_job("jobs_here.py:make").name == "loaded"
    assert load_job(f"{folder}/jobs_here.py:make").name == "loaded"
    assert load_job("pack.inner:make").name == "loaded"


def test_a_file_may_have_the_name_of_a_library(folder: Path) -> None:
    assert load_job("json.py:make").name == "loaded"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("jobs_here.py", "model 'jobs_here.py' names no function\nhint: name a function that returns"),
        (":make", "model ':make' names no function"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("pack.nowhere:make", "there is no module pack.nowhere"),
        ("nowhere:make", "there is no module nowhere"),
        ("jobs_here.py:maek", "jobs_here.py has no function maek\nhint: did you mean make?"),
        ("jobs_here.py:constant", "jobs_here.py has something that is not a function under constant"),
        ("jobs_here.py:number", "jobs_here.py:number returned a int instead of a pipeloom.Job"),
        ("jobs_here.py:needs", "jobs_here.py:needs cannot be called without arguments: missing a required"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(spec)
    assert str(caught.value).startswith(message)


def test_errors_of_the_users_code_stay_theirs(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="the user's own error"):
        load_job("jobs_here.py:broken")
    with pytest.raises(ModuleNotFoundError, match="a_module_nobody_has"):
        load_job("lacking.py:make")
    with pytest.raises(ModuleNotFoundError, match="a_module_nobody_has"):
        load_job("lacking:make")
