"""Times of single actions, and copies that take none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.ir.action import OFFLOAD, SEND_F, STEP, Action, B, F, Kind, W
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import PlanError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.schedule import parse_program
from pipeloom.ir.stages import chain
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate


def simulated(own_s: dict[Action, float]) -> Timeline:
    device, link = Device(name="any", memory_bytes=1), Link(bandwidth_bytes_per_s=1e9)
    program = parse_program(1, (0,), ("0F0 0B0 0STEP",))
    cluster = Cluster(devices=(device,), within_node=link)
    return simulate(program, chain(1), equal_costs(1), cluster, action_s=own_s)


def test_an_action_takes_its_own_time() -> None:
    assert simulated({}).step_s == 3.0 and simulated({Action(0, B, 0): 0.5}).step_s == 1.5


STRANGERS = [
    Action(0, W, 0),
    Action(0, F, 1),
    Action(1, F, 0),
    Action(0, Kind("NOWHERE"), 0),
    Action(0, OFFLOAD, 0),
    Action(0, STEP, 0),
    Action(0, SEND_F, 0),
]


@pytest.mark.parametrize(
    ("action", "seconds", "words"),
    [
        *((action, 1.0, f"{action} is given .* but is no action of") for action in STRANGERS),
        *((Action(0, B, 0), bad, f"0B0 is to take {bad} s") for bad in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_strangers_and_times_that_are_none_are_refused(action: Action, seconds: float, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        simulated({action: seconds})


@pytest.mark.parametrize(("microbatches", "peak"), [(3, 16), (4, 24)])
def test_the_host_holds_what_has_come_and_not_left(microbatches: int, peak: int) -> None:
    """All but the last micro-batch, whose backward follows at once. Copies that take no time left before they
    had come, so the curve fell below zero."""
    policy = MemoryPolicy(stages=({"x": "offload"},))
    program = lower(registry.build("gpipe", chain(1), (0,), microbatches), chain(1), policy=policy)
    (cost,) = equal_costs(1)
    costs = (replace(cost, residual_bytes=8, offloaded_bytes=8),)
    cluster = Cluster(
        devices=(Device(name="any", memory_bytes=1),), within_node=Link(bandwidth_bytes_per_s=1.0)
    )
    (host,) = (c for c in simulate(program, chain(1), costs, cluster).memory if c.tier == "host")
    assert min(host.sizes) == 0 and max(host.sizes) == peak
