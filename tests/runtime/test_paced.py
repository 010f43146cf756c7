"""Paced ranks run the real worker: actions in the order of the program, none before what it needs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from paced import SECONDS, PacedRank, assert_in_order, costs_of, paced_step, program_of
from runs import threads

from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.timeline import Timeline
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.launch import launch


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_v", "interleaved_1f1b", "dualpipe"])
def test_ranks_as_threads(name: str) -> None:
    program, stages = program_of(name)

    def work(rank: int, channel: Channel) -> Timeline:
        with channel.watch as watch:
            paced = PacedRank(program, stages, costs_of(stages), channel, watch)
            paced.step()
            return paced.step()

    for timeline in threads(2, work):
        assert_in_order(timeline, program, stages)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_stage_that_recomputes_ahead(name: str) -> None:
    policy = MemoryPolicy(stages=({"a": "recompute"}, {"a": "recompute"}), ahead=(0,))
    program, stages = program_of(name, policy)
    costs = tuple(replace(cost, recompute_s=SECONDS) for cost in costs_of(stages))

    def work(rank: int, channel: Channel) -> Timeline:
        with channel.watch as watch:
            return PacedRank(program, stages, costs, channel, watch).step()

    for timeline in threads(2, work):
        again = [e for e in timeline.events if "RECOMPUTE" in e.action]
        assert sorted(e.action for e in again) == [f"0RECOMPUTE{m}" for m in range(4)]
        assert all(e.duration_s >= SECONDS for e in again)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    assert launch(paced_step, 2, args=("zb_h1", file)) == 0
    assert json.loads(file.read_text()) == [0, 1]
