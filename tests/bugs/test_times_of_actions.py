"""Times of single actions that the program lacks went to its last entry, or were a traceback."""

from __future__ import annotations

import pytest

from pipeloom.ir.action import OFFLOAD, SEND_F, STEP, Action, B, F, Kind, W
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import PlanError
from pipeloom.ir.schedule import parse_program
from pipeloom.ir.stages import chain
from pipeloom.ir.timeline import Timeline
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


@pytest.mark.parametrize("action", STRANGERS, ids=str)
def test_actions_that_the_program_lacks_are_refused(action: Action) -> None:
    with pytest.raises(PlanError, match=f"{action} is given a time of its own, but is no action of the pro"):
        simulated({action: 1.0})


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(PlanError, match=f"0B0 is to take {seconds} s"):
        simulated({Action(0, B, 0): seconds})
