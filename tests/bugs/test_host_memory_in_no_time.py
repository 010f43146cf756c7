"""Copies that take no time: what left the host before it had come there, so its curve fell below zero and its
peak was forecast too low."""

from dataclasses import replace

import pytest

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.stages import chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate


@pytest.mark.parametrize(("microbatches", "peak"), [(3, 16), (4, 24)])
def test_the_host_holds_what_has_come_and_not_left(microbatches: int, peak: int) -> None:
    """All but the last micro-batch, whose backward follows at once."""
    policy = MemoryPolicy(stages=({"x": "offload"},))
    program = lower(registry.build("gpipe", chain(1), (0,), microbatches), chain(1), policy=policy)
    (cost,) = equal_costs(1)
    costs = (replace(cost, residual_bytes=8, offloaded_bytes=8),)
    cluster = Cluster(
        devices=(Device(name="any", memory_bytes=1),), within_node=Link(bandwidth_bytes_per_s=1.0)
    )
    (host,) = (c for c in simulate(program, chain(1), costs, cluster).memory if c.tier == "host")
    assert min(host.sizes) == 0 and max(host.sizes) == peak
