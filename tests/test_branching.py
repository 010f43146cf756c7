"""The models of `bench/graphpipe.py`: what they compute, how they are captured, and that cuts keep it."""

import graphpipe
import nets
import pytest
from runs import capture_of

from pipeloom import Job, Plan, verify
from pipeloom.planning import plan

TOLERANCE = 1e-5


def planned(job: Job, stages: int, strategy: str) -> Plan:
    how = {"cluster": f"{stages} x v100-16", "planner": strategy, "captured": capture_of(job)}
    return plan(job, ranks=stages, microbatches=4, microbatch_size=2, **how)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stages"), [("exact", 4), *(("graphpipe", n) for n in (3, 4, 5, 6))])
@pytest.mark.parametrize("name", [*graphpipe.SMALL, "t5"])
def test_planned_stages_give_what_one_process_gives(name: str, strategy: str, stages: int) -> None:
    """The layers of T5's decoder all read what its encoder makes: one block of nearly all ops."""
    job = nets.job("t5") if name == "t5" else graphpipe.SMALL[name]()
    made = planned(job, stages, strategy)
    assert len(made.stages) == stages
    verify(job, made, tolerance=TOLERANCE).require()
