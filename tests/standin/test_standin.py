"""Runs `cases`, each file in a process that has the stand-in accelerator."""

import shutil
import sys
from os import environ
from pathlib import Path

import processes
import pytest

CASES = Path(__file__).parent / "cases"
FILES = {
    "rules": ("check_device.py", "check_ops.py", "check_group.py", "check_transport.py"),
    "pipelines": ("check_pipelines.py", "../../gpu/test_steps.py"),
    "gpu check": ("check_gpu_check.py",),
    "every plan": ("check_two_ranks.py::test_every_plan",),
    "lacks": ("check_two_ranks.py::test_what_two_ranks_lack_is_reported",),
}


@pytest.mark.sampled("rules")
@pytest.mark.parametrize("names", FILES.values(), ids=FILES)
def test_the_stand_in(names: tuple[str, ...]) -> None:
    if sys.platform != "linux":
        pytest.skip("the stand-in accelerator needs Linux: it maps memory twice")
    if shutil.which(environ.get("CXX", "g++")) is None:
        pytest.skip("the stand-in accelerator needs a C++ compiler: no g++ here, and CXX names none")
    quiet = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    status, said, errors = processes.run(
        *quiet, *(CASES / name for name in names), env={"STANDIN": "1", "STANDIN_DEVICES": "3"}
    )
    assert status == 0, said + errors
