"""Buffers that the forward changes: where a model can be cut, and in which order its forwards may run."""

from dataclasses import replace

import pytest
from odd.case import job
from odd.state import NormTwice
from runs import even_plan, pipelined

from pipeloom.checks.schedules import forwards_in_order
from pipeloom.ir.errors import CutError, ScheduleError
from pipeloom.ir.stages import cut
from pipeloom.schedules import registry
from pipeloom.tracer.capture import capture

TWICE = job(NormTwice)


def test_a_norm_used_twice_cannot_be_torn_apart() -> None:
    graph = capture(TWICE, 2).graph
    names = [op.name for op in graph.ops if not op.cheap]
    with pytest.raises(CutError, match="buffer norm.* is updated"):
        cut(graph, {name: index * 3 // len(names) for index, name in enumerate(names)})


def test_micro_batches_in_another_order_are_refused_where_a_forward_updates_buffers() -> None:
    plan = even_plan(TWICE, 1, microbatches=2, schedule="gpipe")
    swapped = replace(plan, schedule_rows=("0F1 0F0 0B0 0B1",))
    with pytest.raises(ScheduleError, match="0F0 after 0F1, but stage 0 updates norm.") as caught:
        pipelined(TWICE, swapped, [TWICE.batch(0, 4)])
    assert "in the order of their micro-batches" in str(caught.value.hint)


@pytest.mark.parametrize("name", registry.names())
def test_all_schedules_of_the_library_run_forwards_in_order(name: str) -> None:
    stages, placement = registry.default_placement(name, 4)
    made = registry.build(name, stages, placement, 8)
    forwards_in_order(made, dict.fromkeys(range(made.stages), "buffer"))
