"""Runs `cases`, each file in a process that has the stand-in accelerator."""

import shutil
import sys
from os import environ
from pathlib import Path

import processes
import pytest

CASES = Path(__file__).parent / "cases"
RULES = ("check_device.py", "check_ops.py", "check_group.py", "check_transport.py")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(RULES, id="rules"),
        pytest.param(
            ("check_pipelines.py", "../../gpu/test_steps.py"), marks=pytest.mark.slow, id="pipelines"
        ),
        pytest.param(("check_gpu_check.py",), marks=pytest.mark.slow, id="gpu check"),
        pytest.param(("check_two_ranks.py::test_every_plan",), marks=pytest.mark.slow, id="every plan"),
        pytest.param(
            ("check_two_ranks.py::test_what_two_ranks_lack_is_reported",), marks=pytest.mark.slow, id="lacks"
        ),
    ],
)
def test_the_stand_in(names: tuple[str, ...]) -> None:
    if sys.platform != "linux":
        pytest.skip("the stand-in accelerator needs Linux: it maps memory twice")
    if shutil.which(environ.get("CXX", "g++")) is None:
        pytest.skip("the stand-in accelerator needs a C++ compiler: no g++ here, and CXX names none")
    words = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *(CASES / name for name in names),
    )
    status, said, errors = processes.run(*words, env={"STANDIN": "1", "STANDIN_DEVICES": "3"})
    assert status == 0, said + errors
