"""Paced ranks run the real worker: actions in the order of the program, none before what it needs."""

import json
from pathlib import Path

import pytest
from paced_ranks import assert_in_order, costs_of, paced_step, program_of
from runs import threads

from pipeloom.ir.timeline import Timeline
from pipeloom.runtime.launch import launch
from pipeloom.runtime.local_channel import LocalChannel
from pipeloom.runtime.paced import PacedRank


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_v", "interleaved_1f1b", "dualpipe"])
def test_ranks_as_threads(name: str) -> None:
    program, stages = program_of(name)

    def work(rank: int, channel: LocalChannel) -> Timeline:
        with channel.watch as watch:
            paced = PacedRank(program, stages, costs_of(stages), channel, watch)
            paced.step()
            return paced.step()

    for timeline in threads(2, work):
        assert_in_order(timeline, program, stages)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    assert launch(paced_step, 2, args=("zb_h1", file)) == 0
    assert json.loads(file.read_text()) == [0, 1]
