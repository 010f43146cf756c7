"""How long ranks hold what they have sent, worked out by hand."""

from __future__ import annotations

import pytest

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.stages import chain
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate

STAGES = chain(2)


def run(microbatches: int, *, small_bytes: int | None, caps: tuple[int, ...] = ()) -> Timeline:
    """GPipe on two ranks; a forward takes 1 s, a message of 4 bytes half a second."""
    device = Device(name="any", memory_bytes=1)
    link = Link(bandwidth_bytes_per_s=8.0, latency_s=0.0)
    cluster = Cluster(devices=(device, device), within_node=link)
    program = lower(registry.build("gpipe", STAGES, (0, 1), microbatches), STAGES)
    return simulate(program, STAGES, equal_costs(2), cluster, caps=caps, small_bytes=small_bytes)


def held(timeline: Timeline, rank: int, at_s: float) -> int:
    """Bytes that a rank holds at some time."""
    curve = timeline.memory[rank]
    return [size for time, size in zip(curve.times_s, curve.sizes, strict=True) if time <= at_s][-1]


@pytest.mark.parametrize(("small_bytes", "bytes_held"), [(None, 12), (0, 16), (4, 16)])
def test_a_message_is_held_until_the_action_ends_in_which_it_got_through(
    small_bytes: int | None, bytes_held: int
) -> None:
    """That of F0 is through at 1.5 s, in F1; besides it, 8 bytes to receive in, and the 4 that F1 makes."""
    assert held(run(3, small_bytes=small_bytes), 0, 1.75) == bytes_held


def test_small_messages_are_held_until_the_step_ends() -> None:
    """While F3 runs: 8 bytes to receive in, what it makes, and the messages of F2, or of F0, F1 and F2."""
    assert held(run(4, small_bytes=0), 0, 3.75) == 16
    assert held(run(4, small_bytes=4), 0, 3.75) == 24
    end = run(4, small_bytes=4)
    assert held(end, 0, end.step_s) == 0


def test_a_rank_waits_for_its_sends_before_it_passes_its_cap() -> None:
    free, late = (run(4, small_bytes=small).peak_bytes(0) for small in (None, 4))
    assert free < late
    assert run(4, small_bytes=4, caps=(late, late)).peak_bytes(0) == late
    assert run(4, small_bytes=4, caps=(late - 1, late)).peak_bytes(0) == free
