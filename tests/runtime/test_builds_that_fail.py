"""Pipelines that cannot be built end cleanly."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import runs
import zoo
from processes import run

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import PeerError
from pipeloom.runtime.channel import Channel

SCRIPT = textwrap.dedent(
    """
    import os, sys, threading
    from dataclasses import replace
    import runs, zoo
    from pipeloom import Pipeline
    from pipeloom.ir.errors import PipeloomError
    from pipeloom.runtime.launch import launch

    def work(caps):
        job = zoo.job("skips")
        plan = replace(runs.even_plan(job, 2, microbatches=2), caps=caps)
        try:
            Pipeline(job, plan)
        except PipeloomError as error:
            print(os.environ["RANK"], type(error).__name__)
        print("left:", [t.name for t in threading.enumerate() if t.name.startswith("pipeloom")])

    if __name__ == "__main__":
        sys.exit(launch(work, 2, args=((1, 1),)))
    """
)


@pytest.mark.slow
def test_no_thread_is_left_and_the_end_is_clean(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    status, output, errors = run(script)
    assert (status, errors) == (0, "")
    assert sorted(output.splitlines()) == [
        "0 MemoryCapError",
        "[rank 1] 1 MemoryCapError",
        "[rank 1] left: []",
        "left: []",
    ]


def test_the_other_ranks_are_told_why() -> None:
    job = zoo.job("skips")
    plan = runs.even_plan(job, 2, microbatches=2)

    def rank(index: int, channel: Channel) -> str:
        def scheduler(optimizer: object) -> None:
            raise ValueError("the user's own mistake")

        if index == 0:
            with pytest.raises(ValueError, match="own mistake"):
                Pipeline(job, plan, options=Options(scheduler=scheduler), channel=channel)
            return ""
        with pytest.raises(PeerError) as caught, Pipeline(job, plan, channel=channel) as pipeline:
            pipeline.step(job.batch(0, 4))
        return str(caught.value)

    _, told = runs.threads(2, rank, timeout_s=60.0)
    assert told.startswith("rank 0 failed: ValueError: the user's own mistake")
