"""Sweeps of stages that make residuals again inside their backward, against a plain reference; its use."""

import random
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st
from random_ops import cluster_of, op_chain
from random_stages import random_model
from trials import examples

from pipeloom.ir.profile import OpCost
from pipeloom.ir.stages import cut
from pipeloom.planner.stage_cost import recompute_liveness
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.planner.stage_cost.recompute_liveness import KEEP, OFFLOAD, RECOMPUTE, RecomputeLiveness
from pipeloom.planner.stage_cost.stage_estimate import stage_liveness
from pipeloom.planner.treatments import greedy
from pipeloom.planner.treatments.choose import treat_interval


def moments(model: CostModel, end: int, in_flight: int = 1, start: int = 0) -> RecomputeLiveness:
    """Of the stage of ops [start, end), between others."""
    names = [op.name for op in model.readers.ops]
    number = {name: (place >= start > 0) + (place >= end) for place, name in enumerate(names)}
    footprint = model.stage_footprint(cut(model.graph, number), number[names[start]])
    return stage_liveness(model, footprint, range(start, end), 0, in_flight=in_flight)


def letting_go(model: CostModel, seed: int) -> CostModel:
    """The same, but some backwards make their gradients in two parts."""
    draw, costs = random.Random(seed), dict(model.profile.costs)
    for name, cost in costs.items():
        if draw.random() < 0.5:
            lets_go = draw.choice(("", *cost.saves))
            first, rest = draw.randint(1, 200), draw.randint(1, 200)
            costs[name] = replace(cost, lets_go=lets_go, grad_first_bytes=first, grad_rest_bytes=rest)
    profile = replace(model.profile, costs=costs)
    return CostModel(model.graph, [profile] * len(model.kind), model.cluster, model.options)


@examples(60, 150)
@given(seed=st.integers(0, 10**6), ops=st.integers(3, 30), data=st.data())
def test_levels_are_those_of_a_plain_reference(seed, ops, data):
    model, end = letting_go(random_model(seed, ops), seed), ops - 1
    found = moments(model, end)
    residuals = found.residuals
    which = data.draw(st.lists(st.booleans(), min_size=len(residuals), max_size=len(residuals)))
    choice = np.where(np.array(which, dtype=bool) & residuals.may, RECOMPUTE, KEEP)
    dropped = frozenset(n for n, kind in zip(residuals.names, choice, strict=True) if kind == RECOMPUTE)
    plain, slow = SlowStage(model, end, frozenset()), SlowStage(model, end, dropped)
    most = found.highest_levels(choice)
    levels = found.stage.levels[:, :end]
    assert levels[recompute_liveness.FORWARD].tolist() == slow.forward()
    assert levels[recompute_liveness.KEPT_FORWARD].tolist() == plain.forward()
    before = {step.at: (held, after) for step, held, after in plain.backward()}
    expected = np.zeros(end)
    for step, held, after in slow.backward():
        place = step.at
        kept, later = before[place]
        if step.kind == "again":
            here = levels[recompute_liveness.KEPT_BEFORE, place] - kept + held
        else:
            whole = recompute_liveness.KEPT_WHOLE if slow.stays(place) else recompute_liveness.KEPT_UNTIL
            until = levels[whole, place]
            here = max(until - kept + held, levels[recompute_liveness.KEPT_AFTER, place] - later + after)
        expected[place] = max(expected[place], here)
    assert levels[recompute_liveness.BACKWARD].tolist() == expected.tolist()
    assert most == (max(slow.forward()), expected.max())
    assert [op for op in range(end) if found.stage.marks[recompute_liveness.AT, op] >= 0] == sorted(
        model.readers.position[step.op] for step in slow.steps if step.kind == "again"
    )


@examples(80, 300)
@given(seed=st.integers(0, 10**6), ops=st.integers(3, 40), in_flight=st.integers(1, 3))
def test_no_residual_kept_again_lowers_the_peak_below_its_bound(seed, ops, in_flight):
    model, draw = letting_go(random_model(seed, ops, several_outputs=True), seed), random.Random(seed)
    start = draw.choice((0, 0, draw.randrange(ops - 1)))
    found = replace(moments(model, ops - 1, in_flight, start), ahead=draw.random() < 0.1)
    may = found.residuals.may.astype(np.int64)
    kinds = [RECOMPUTE if ok and draw.random() < 0.8 else draw.choice((KEEP, OFFLOAD)) for ok in may]
    task = greedy.TreatmentProblem(
        moments=found, allowance=0.0, per_offloaded=1.0, hidden=0.0, most=inf, s_per_byte=0.0, may=may
    )
    plan = greedy.greedy_state(task)
    _, numbers, figures, sums, limits = plan
    for k, kind in enumerate(kinds):
        numbers[greedy.OPTION, k] = kind
        greedy.treat(k, found.stage, plan)
    limits[greedy.PEAK] = recompute_liveness.peak_of(found.stage, sums)
    greedy.least_peaks(found.stage, plan)
    for k in np.flatnonzero(kinds):
        fewer = np.array(kinds)
        fewer[k] = KEEP
        assert figures[greedy.LEAST, k] <= found.peak(fewer)


RUN_AGAIN = {10: (None, 5, 3, 1), 21: (None, None, 14, 12, 10, 8, 6, 4, 2)}
"""Ops of a chain -> how many run again at least, under 2000 bytes and every 800 more, by integer programming;
None where nothing fits."""


@pytest.mark.parametrize("ops", RUN_AGAIN)
def test_checkpoints_of_a_chain(ops):
    """Equal ops that save what they make, one micro-batch in flight: few are kept, and the stretches between
    them get shorter."""
    graph, profile = op_chain([1.0] * ops, [100] * ops, weight=0)
    cost = OpCost(forward_s=1.0, input_grad_s=1.0)
    costs = {o.name: replace(cost, saves=(o.outputs[0].name,), passes=o.inputs) for o in graph.ops}
    made = replace(profile, costs=costs)
    model = CostModel(graph, [made], cluster_of([1 << 40]), CostOptions(microbatches=16))
    treat = partial(treat_interval, model, 0, ops, 0, in_flight=1)
    free = treat(cap=inf)
    for cap, least in zip(np.arange(2000, free.peak_bytes, 800), RUN_AGAIN[ops], strict=True):
        found = treat(cap=cap)
        assert (len(found.treatments) if found.fits else None) == least, cap
        if found.fits:
            assert found.peak_bytes <= cap
            assert found.seconds == pytest.approx(free.seconds + least)
            kept = [place for place in range(ops) if f"op{place}" not in found.treatments]
            stretches = np.diff([-1, *kept])
            assert (np.diff(stretches) <= 0).all(), kept


# What a stage holds while residuals are made again inside its backward, by keeping a set of tensors
# alive.


class Step(NamedTuple):
    """One thing that happens. kind: "again" (an op of the forward) or "backward".  at: of which op's backward
    it is a part."""

    kind: str
    op: str
    at: int


class SlowStage:
    """Ops 0 .. end of a model whose values are no views, with residuals dropped by name."""

    def __init__(self, model: CostModel, end: int, dropped: frozenset[str]) -> None:
        self.ops = model.readers.ops[:end]
        self.costs = model.profile.costs
        self.size = {v.name: v.bytes for op in self.ops for v in op.outputs}
        self.maker = {v.name: op.name for op in self.ops for v in op.outputs}
        self.op = {op.name: op for op in self.ops}
        self.saved = {op.name: [v for v in self.costs[op.name].saves if v in self.maker] for op in self.ops}
        self.residuals = {v for saved in self.saved.values() for v in saved}
        self.dropped = dropped & self.residuals
        self.sent = {v for op in model.readers.ops[end:] for v in op.inputs if v in self.maker}
        self.steps = self._steps()

    def _steps(self) -> list[Step]:
        """The backward in its order, with each op that runs again in front of the first that needs it."""
        order = {op.name: place for place, op in enumerate(self.ops)}
        steps: list[Step] = []
        done: set[str] = set()
        for place in reversed(range(len(self.ops))):
            name = self.ops[place].name
            needed: set[str] = set()
            pending = [v for v in self.saved[name] if v in self.dropped]
            while pending:
                maker = self.maker[pending.pop()]
                if maker not in needed and maker not in done:
                    needed.add(maker)
                    inputs = [v for v in self.op[maker].inputs if v in self.maker]
                    pending += [v for v in inputs if v not in self.residuals or v in self.dropped]
            done |= needed
            steps += [Step("again", op, place) for op in sorted(needed, key=order.__getitem__)]
            steps.append(Step("backward", name, place))
        return steps

    def _reads(self, step: Step) -> set[str]:
        if step.kind == "backward":
            return set(self.saved[step.op])
        return {v for v in self.op[step.op].inputs if v in self.maker}

    def backward(self) -> list[tuple[Step, float, float]]:
        """Bytes of tensors, without those of gradients, in each step and after it."""
        last = {value: index for index, step in enumerate(self.steps) for value in self._reads(step)}
        alive = set(self.residuals - self.dropped)
        extra = {op.name: self.costs[op.name].extra_saved_bytes for op in self.ops}
        found: list[tuple[Step, float, float]] = []
        for index, step in enumerate(self.steps):
            held = sum(extra.values())
            if step.kind == "again":
                made = {v.name for v in self.op[step.op].outputs}
                besides = self.costs[step.op].transient_bytes + self.costs[step.op].extra_saved_bytes
                twice = sum(self.size[v] for v in made & alive)  # those that were kept are made once more
                alive |= made
                here = held + twice + besides + self._bytes(alive)
            else:
                here = held + self._bytes(alive)
                held -= extra.pop(step.op)
            alive = {v for v in alive if last.get(v, -1) > index}
            found.append((step, here, held + self._bytes(alive)))
        return found

    def stays(self, place: int) -> bool:
        """Whether what the backward of an op lets go of early is read again later."""
        value = self.costs[self.ops[place].name].lets_go
        return any(value in self._reads(step) for step in self.steps[self._backward_at(place) + 1 :])

    def _backward_at(self, place: int) -> int:
        return self.steps.index(Step("backward", self.ops[place].name, place))

    def forward(self) -> list[float]:
        """Bytes of tensors in each op; what is sent stays to the end."""
        last = {v: place for place, op in enumerate(self.ops) for v in op.inputs}
        held, alive, found = 0.0, set[str](), []
        for place, op in enumerate(self.ops):
            alive |= {v.name for v in op.outputs}
            held += self.costs[op.name].extra_saved_bytes
            found.append(held + self.costs[op.name].transient_bytes + self._bytes(alive))
            kept = (self.residuals - self.dropped) | self.sent
            alive = {v for v in alive if v in kept or last.get(v, place) > place}
        return found

    def _bytes(self, values: set[str]) -> float:
        return float(sum(self.size[v] for v in values))
