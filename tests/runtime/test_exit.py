"""A script of two ranks that closes nothing ends well, and keeps what it has in its globals."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import runs

SCRIPT = textwrap.dedent(
    """
    import atexit, sys, threading

    def last():  # registered first, so called last
        print("at exit:", *(name for name in KEPT if globals().get(name) is None))
        print("threads:", *(t.name for t in threading.enumerate() if "pipeloom" in t.name))

    atexit.register(last)
    KEPT = ["pipeline", "group", "mesh", "views"]
    import plain_net, runs
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from pipeloom import Options, Pipeline

    mesh = False
    if sys.argv[1] == "theirs":
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    job = plain_net.two_linears()
    plan = runs.even_plan(job, 2, microbatches=2)
    pipeline = Pipeline(job, plan, options=Options(compare=False), group=mesh or None)
    group = dist.group.WORLD
    atexit.register(lambda: print("initialised:", dist.is_initialized()))
    for step in range(2):
        pipeline.step(job.batch(step, 4))
    views = [p.view(-1) for p in pipeline.weights.params.values()]
    if sys.argv[1] == "fails" and pipeline.rank == 1:
        raise ValueError("no such luck")
    if sys.argv[1] == "fails":
        pipeline.step(job.batch(3, 4))
    """
)


def ends_of(kind: str) -> list[tuple[int, str, str]]:
    """Status, output and errors of both ranks of the script, started as a launcher would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    paths = [str(Path(runs.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | shared | {"RANK": str(rank), "PYTHONPATH": os.pathsep.join(paths)},
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_it_ends_with_status_0_and_keeps_its_globals(kind: str, times: int) -> None:
    for _ in range(times):
        for status, output, errors in ends_of(kind):
            assert (status, errors) == (0, "")
            assert output.splitlines() == ["initialised: True", "at exit:", "threads:"]


def test_what_it_ends_with_is_told_to_the_others() -> None:
    waiting, failed = ends_of("fails")
    assert failed[0] == 1 and failed[2].count("Traceback") == 1 and "no such luck" in failed[2]
    assert waiting[0] == 1 and "rank 1 failed: ValueError: no such luck" in waiting[2]
