"""When a script ends, gloo's threads have ended before the interpreter is torn down."""

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
    import atexit, os, sys

    def threads():  # registered first, so called last
        tasks = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
        print("left:", [name for name in (open(task).read().strip() for task in tasks) if "gloo" in name])

    atexit.register(threads)
    import runs, torch, zoo
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from pipeloom import Pipeline

    job = zoo.job("skips")
    plan = runs.even_plan(job, 1, microbatches=2)
    group = mesh = None
    if sys.argv[1] != "ours":
        dist.init_process_group("gloo")
        atexit.register(lambda: print("initialised:", dist.is_initialized()))
        group = dist.group.WORLD
    if sys.argv[1] == "mesh":
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    if sys.argv[1] == "ours":
        from pipeloom.runtime.launch import connect
        group = connect(torch.device("cpu"))
    pipeline = Pipeline(job, plan, group=mesh or group)
    pipeline.step(job.batch(0, 4))
    pipeline.close()
    """
)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("kept", ["group", "mesh", "ours"])
def test_no_thread_of_gloo_is_left(kept: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kept],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | own | {"PYTHONPATH": str(Path(runs.__file__).parent)},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = ["left: []"] if kept == "ours" else ["initialised: True", "left: []"]
    assert done.stdout.splitlines() == said
