"""Operations that a user declares run at their places, with ranks as threads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import good
from odd.case import Stack, job
from runs import capture_of, each_rank, even_plan
from torch import Tensor

from pipeloom import Plan, verify
from pipeloom.ir.action import B, F, Kind, W
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.operation import Operation, declare
from pipeloom.runtime.operations import OperationContext
from pipeloom.schedules import registry
from pipeloom.schedules.language.patterns import phases
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.registry import Entry

EXAMPLES = Path(__file__).parents[2] / "examples"

JOB = job(Stack)


def plan_for(recipe: Callable[[Shape], Recipe], *, stages: int = 2, microbatches: int = 4) -> Plan:
    flat = even_plan(JOB, stages, microbatches=microbatches)
    graph = flat.stage_graph(capture_of(JOB, 2).graph)
    shape = replace(registry.shape_of(stages, microbatches=microbatches), stages=graph)
    rows, _, pairs = Entry(recipe=recipe).make(shape)
    made = replace(flat.as_schedule, rows=tuple(map(tuple, rows)), pairs=pairs)
    return replace(flat, schedule="mine", schedule_rows=tuple(str(made).splitlines()))


def one_f_one_b(*insert: Operation) -> Callable[[Shape], Recipe]:
    return lambda s: Recipe(
        priority=lambda a: (a.kind == F, a.microbatch), in_flight=lambda r: s.ranks - r, insert=insert
    )


def with_op(handler: Callable[[OperationContext], Any], **fields: Any) -> Callable[[Shape], Recipe]:
    anchor: dict[str, Kind] = {} if "before" in fields else {"after": W}
    added = declare(Operation(letters="OP", meaning="an operation", handler=handler, **(anchor | fields)))

    def recipe(s: Shape) -> Recipe:
        rows = phases(s, warm_up=lambda rank: s.ranks - 1 - rank, repeat="FI")
        return Recipe(kinds="FIW", rows=rows, insert=(added,))

    return recipe


def test_handlers_see_their_place() -> None:
    seen: dict[tuple[int, int], OperationContext] = {}

    def look(context: OperationContext) -> None:
        seen[context.stage, context.microbatch] = context
        context.state["calls"] = context.state.get("calls", 0) + 1

    found = verify(JOB, plan_for(with_op(look)))
    assert found.passed
    assert sorted(seen) == [(stage, b) for stage in (0, 1) for b in range(4)]
    last = seen[1, 3]
    assert (last.rank, last.ranks, last.microbatches, last.last) == (1, 2, 4, True)
    assert not seen[1, 2].last and last.state == {"calls": 4}
    assert "head.weight" in last.gradients and "inlet.weight" in seen[0, 0].gradients


def test_a_handler_may_change_gradients() -> None:
    def halve(context: OperationContext) -> None:
        if context.last:
            for gradient in context.gradients.values():
                gradient.mul_(0.5)

    found = verify(JOB, plan_for(with_op(halve)))
    assert not found.passed
    assert found.gradients["head.weight"] == pytest.approx(0.5, abs=1e-6)


def test_residuals_may_leave_and_come_back() -> None:
    """An offload and a reload; in between the stage holds nothing of the micro-batch."""
    away: dict[tuple[int, int], dict[Any, Tensor]] = {}

    def leave(context: OperationContext) -> None:
        assert context.residual_bytes > 0
        away[context.stage, context.microbatch] = dict(context.residuals)
        context.residuals.clear()

    def come_back(context: OperationContext) -> None:
        assert not context.residuals
        context.residuals.update(away.pop((context.stage, context.microbatch)))

    out = declare(Operation(letters="AWAY", meaning="offload", after=F, stream="host", handler=leave))
    back = declare(Operation(letters="BACK", meaning="reload", before=B, stream="host", handler=come_back))
    assert verify(JOB, plan_for(one_f_one_b(out, back))).passed and not away


def test_ranks_exchange_data(quick_rehearsals: None) -> None:
    sums, parts = [], []

    def exchange(context: OperationContext) -> None:
        tensor = torch.tensor([1.0 + context.rank])
        context.all_reduce(tensor)
        sums.append(float(tensor))
        given = [torch.tensor([10 * context.rank + target]) for target in range(2)]
        parts.append((context.rank, [int(t) for t in context.all_to_all(given)]))
        with pytest.raises(ScheduleError, match="1 parts for 2 partners"):
            context.all_to_all(given[:1])

    plan = plan_for(with_op(exchange, meets=lambda stage: (1 - stage,)))
    assert verify(JOB, plan).passed
    assert sums == [3.0] * 8
    assert sorted(parts) == [(0, [0, 10])] * 4 + [(1, [1, 11])] * 4
    # A rehearsal calls handlers too, with a channel that leads nowhere.
    each_rank(JOB, plan, lambda pipeline: pipeline.predict())


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (lambda context: context.all_reduce(torch.zeros(1)), "exchanges data, but meets no other"),
        (lambda context: 3, ".OP. returned an int"),
    ],
)
def test_a_handler_that_does_what_cannot_be_is_named(handler: Callable[..., object], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        verify(JOB, plan_for(with_op(handler)))


def test_what_a_handler_begins_is_waited_for_where_it_is_needed() -> None:
    order: list[str] = []

    def begin(context: OperationContext) -> Callable[[], None]:
        order.append(f"begin {context.microbatch}")
        return lambda: order.append(f"wait {context.microbatch}")

    def look(context: OperationContext) -> None:
        order.append(f"done {context.microbatch}")

    early = Operation(letters="EARLY", meaning="prefetch", before=F, ahead=1, stream="host", handler=begin)
    seen = Operation(letters="SEEN", meaning="look", after=F, handler=look)
    recipe = one_f_one_b(declare(early), declare(seen))
    assert verify(JOB, plan_for(recipe, stages=1, microbatches=3)).passed
    expected = "begin 0, begin 1, wait 0, done 0, begin 2, wait 1, done 1, wait 2, done 2"
    assert ", ".join(order) == expected


def test_the_example_is_verified() -> None:
    words = ("verify", f"{EXAMPLES / 'own_model.py'}:job", "--ranks", "2", "--microbatch-size", "4")
    assert "equal within" in good(*words, "--schedule", f"{EXAMPLES / 'own_schedule.py'}:compressed")
