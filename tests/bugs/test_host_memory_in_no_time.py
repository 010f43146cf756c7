"""Copies that take no time: what left the host before it had come there, so its curve fell below zero and its
peak was forecast too low."""

from dataclasses import replace

import pytest

from pipeloom import schedules
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.stages import chain
from pipeloom.lowering import lower
from pipeloom.simulator import simulate


@pytest.mark.parametrize(("schedule", "peak"), [("1f1b", 8), ("gpipe", 24)])
def test_the_host_holds_what_has_come_and_not_left(schedule: str, peak: int) -> None:
    policy = MemoryPolicy(stages=({"x": "offload"},))
    program = lower(schedules.build(schedule, chain(1), (0,), 4), chain(1), policy=policy)
    (cost,) = equal_costs(1)
    costs = (replace(cost, residual_bytes=8, offloaded_bytes=8),)
    cluster = Cluster(
        devices=(Device(name="any", memory_bytes=1),), within_node=Link(bandwidth_bytes_per_s=1.0)
    )
    (host,) = (c for c in simulate(program, chain(1), costs, cluster).memory if c.tier == "host")
    assert min(host.sizes) == 0 and max(host.sizes) == peak
