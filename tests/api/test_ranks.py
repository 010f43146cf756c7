"""Ranks that were given different plans stop before they build anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
import runs
import zoo

from pipeloom import Pipeline
from pipeloom.ir.errors import PlanError
from pipeloom.runtime.transports import LocalChannel

GATHER = """
import gc
import torch.distributed as dist
from pipeloom.runtime import gather_text
from pipeloom.runtime.launch import watch_ranks
dist.init_process_group("gloo")
with watch_ranks(dist.group.WORLD) as watch:
    texts = [
        gather_text(dist.group.WORLD, f"{time}-{dist.get_rank()}", watch) for time in ("first", "second")
    ]
assert texts == [["first-0", "first-1"], ["second-0", "second-1"]], texts
dist.barrier()
dist.destroy_process_group()
gc.collect()
"""


def test_different_plans_are_refused_on_all_ranks() -> None:
    job = zoo.job("gpt")
    plans = [runs.even_plan(job, 2, microbatches=count) for count in (2, 3)]

    def rank(index: int, channel: LocalChannel) -> str:
        with pytest.raises(PlanError, match=r"rank 1 has another plan \(\w+\) than rank 0"):
            Pipeline(job, plans[index], channel=channel)
        return "refused"

    with runs.shared_captures():
        assert runs.threads(2, rank) == ["refused", "refused"]


@pytest.mark.slow
def test_processes_tell_each_other_texts() -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    done = subprocess.run(
        [sys.executable, *command, sys.executable, "-c", GATHER], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
