"""Paced ranks for tests: small programs, and what must hold of every step of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from paced import PacedRank

from pipeloom.ir.action import parse_action
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.dependencies import needs, produces
from pipeloom.ir.flow import dag, flow_of
from pipeloom.ir.memory_policy import KEEP_ALL, MemoryPolicy
from pipeloom.ir.schedule import Program
from pipeloom.ir.stages import StageGraph, replicate
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.runtime.channel import dist_channel
from pipeloom.runtime.connect import connect, watch_ranks
from pipeloom.schedules import registry

SECONDS = 1e-4


def program_of(name: str, policy: MemoryPolicy = KEEP_ALL) -> tuple[Program, StageGraph]:
    shape, placement = registry.default_placement(name, 2)
    count = len(placement) // shape.replicas
    one = dag(count, [(s, s + 1) for s in range(count - 1)], value_bytes=1024)
    stages = replicate(one, shape.replicas)
    return lower(registry.build(name, stages, placement, 4), stages, policy=policy), stages


def costs_of(stages: StageGraph) -> tuple[StageCost, ...]:
    return equal_costs(len(stages.stages), forward_s=SECONDS, input_grad_s=2 * SECONDS, weight_grad_s=SECONDS)


def assert_in_order(timeline: Timeline, program: Program, stages: StageGraph) -> None:
    """By the clock that all ranks share: an action starts after what it needs has ended."""
    done: dict[object, float] = {}
    flow = flow_of(stages)
    for rank, row in enumerate(program.rows):
        computed = [e for e in timeline.events if e.rank == rank and e.stream == "compute"]
        wanted = [str(step) for step in row if str(step)[-1].isdigit() and "_" not in str(step)]
        assert [e.action for e in computed if not e.action.endswith("STEP")] == wanted
    events = [e for e in timeline.events if e.stream == "compute" and not e.action.endswith("STEP")]
    for event in events:
        done |= dict.fromkeys(produces(parse_action(event.action)), event.end_s)
    for event in events:
        for need in needs(parse_action(event.action), flow):
            assert event.start_s >= done[need], f"{event.action} at {event.start_s} before {need}"


def paced_step(name: str, file: Path) -> None:
    """What one rank runs; rank 0 writes the ranks whose actions it has seen."""
    group = connect(torch.device("cpu"), timeout_s=300)
    program, stages = program_of(name)
    costs = costs_of(stages)
    with watch_ranks(group) as watch:
        channel = dist_channel(group, watch, device=torch.device("cpu"), timeout_s=300)
        timeline = PacedRank(program, stages, costs, channel, watch).step()
    assert_in_order(timeline, program, stages)
    if channel.rank == 0:
        file.write_text(json.dumps(sorted({e.rank for e in timeline.events})))
