"""The proof of updates: it holds for all that the library makes, and finds whatever is changed in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from unittest.mock import patch

import pytest

from pipeloom.checks.schedules import check_program
from pipeloom.checks.updates import Sums, UpdateProof, prove_updates, sums_of
from pipeloom.ir.action import REDUCE, STEP, Action, B, F, Kind, W
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.plan import Plan, StagePlan, widened
from pipeloom.ir.schedule import Program
from pipeloom.ir.shared_weights import OptimizerShares, optimizer_shares
from pipeloom.ir.stages import StageGraph
from pipeloom.ir.weight_policies import FLUSH, Updates
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.registry import build_steady

EVERY = 4


@dataclass(frozen=True)
class Case:
    """A lowered program with all that the proof reads."""

    program: Program
    stages: StageGraph
    updates: Updates | None
    sums: Sums
    shares: tuple[OptimizerShares, ...] = ()

    def prove(self) -> UpdateProof:
        check_program(self.program, self.stages)
        with patch("pipeloom.checks.updates.sums_of", lambda *_: self.sums):
            return prove_updates(self.program, self.stages, updates=self.updates, shares=self.shares)

    def with_row(self, rank: int, row: Sequence[Action]) -> Case:
        rows = [*self.program.rows]
        rows[rank] = tuple(row)
        return replace(self, program=replace(self.program, rows=tuple(rows)))


def named(stages: StageGraph, *, tied: bool) -> StageGraph:
    """Two parameters of its own for each stage of the model; the first and the last share an embedding."""
    ends = {stages.origin(0), stages.origin(stages.cuts - 1)}

    def own(stage: int) -> tuple[str, ...]:
        origin = stages.origin(stage)
        return (*(["wte"] if tied and origin in ends else []), f"{origin}.a", f"{origin}.b")

    return replace(stages, params=tuple(own(stage) for stage in range(len(stages.stages))))


def of_library(name: str, *, tied: bool = True) -> Case:
    """With a flush, in the usual placement."""
    stages, placement = registry.default_placement(name, 4)
    stages = named(stages, tied=tied)
    program = lower(registry.build(name, stages, placement, 8), stages)
    return Case(program, stages, None, sums_of(stages, placement))


def steady(policy: str, *, name="1f1b", ranks=3, width=1, tied=False, shards=False, clips=False) -> Case:
    """`width` pipelines side by side, which may share out the optimizer's state."""
    shape, placement = registry.default_placement(name, ranks)
    whole, updates = named(shape, tied=tied), None if policy == FLUSH else Updates(policy=policy, every=EVERY)
    flushed = registry.build(name, shape, placement, EVERY)
    body = build_steady(name, whole, placement, updates) if updates else flushed
    parts = tuple(StagePlan(ops=stage.ops) for stage in shape.stages)
    how = {"graph": "", "planner": "", "placement": placement, "schedule": name, "microbatches": EVERY}
    one = Plan(stages=parts, schedule_rows=tuple(str(body).splitlines()), weights=policy, **how)
    plan = widened(one, width)
    stages = plan.replicated(whole)
    sizes = {name: 4 for names in stages.params for name in names}
    shares = optimizer_shares(stages, plan.placement, sizes) if shards else ()
    updates = None if policy == FLUSH else plan.updates
    program = lower(plan.as_schedule, stages, updates=updates, clips=clips)
    return Case(program, stages, updates, sums_of(stages, plan.placement, shares), shares)


STEADY: dict[str, Callable[[], Case]] = {
    "2bw": lambda: steady("2bw"),
    "2bw, tied, clipped": lambda: steady("2bw", tied=True, clips=True),
    "2bw, two pipelines": lambda: steady("2bw", width=2, tied=True),
    "2bw, state shared out": lambda: steady("2bw", width=2, tied=True, shards=True),
    "2bw, zb_h1": lambda: steady("2bw", name="zb_h1"),
    "2bw, two stages a rank": lambda: steady("2bw", name="interleaved_1f1b", ranks=2, tied=True),
    "stash": lambda: steady("stash"),
    "stash, two pipelines": lambda: steady("stash", width=2),
    "flush, state shared out": lambda: steady(FLUSH, ranks=2, width=2, tied=True, shards=True),
}
TRAINING = tuple(name for name in registry.names() if name != "forward_only")


@pytest.mark.parametrize("name", TRAINING)
def test_every_schedule_of_the_library(name: str) -> None:
    proof = of_library(name, tied=not registry.entry(name).lacks).prove()
    assert (proof.policy, proof.updates) == (FLUSH, 1) and proof.parameters >= 8


@pytest.mark.parametrize("name", STEADY)
def test_without_a_flush_and_with_replicas(name: str) -> None:
    case = STEADY[name]()
    proof = case.prove()
    assert proof.microbatches == EVERY * case.stages.replicas
    assert proof.shares == case.stages.replicas if case.shares else proof.shares == 1


# --- faults ---------------------------------------------------------------------------------------

Fault = Callable[[Case, Random], Case]
"""IndexError where the case has nothing to change so."""


def some(case: Case, dice: Random, *kinds: Kind) -> tuple[int, list[Action], int]:
    """A row, and the place in it of an action of these kinds."""
    rows = enumerate(case.program.rows)
    places = [(rank, at) for rank, row in rows for at, action in enumerate(row) if action.kind in kinds]
    rank, at = dice.choice(places)
    return rank, [*case.program.rows[rank]], at


def a_step(case: Case, dice: Random) -> tuple[int, list[Action], int]:
    """Of several updates one."""
    return some(case, dice, *([] if case.updates is None else [STEP]))


def a_sum(case: Case, dice: Random) -> tuple[int, int]:
    """A rank, and the place among its sums of one of several ranks."""
    rows = enumerate(case.sums)
    return dice.choice([(r, at) for r, row in rows for at, one in enumerate(row) if len(one.ranks) > 1])


def a_reduction_is_left_out(case: Case, dice: Random) -> Case:
    rank, row, at = some(case, dice, REDUCE)
    return case.with_row(rank, row[:at] + row[at + 1 :])


def a_sum_loses_a_parameter(case: Case, dice: Random) -> Case:
    rank, at = a_sum(case, dice)
    sums = [[*row] for row in case.sums]
    lost, one = dice.choice(sums[rank][at].names), sums[rank][at]
    sums[rank][at] = replace(one, names=tuple(n for n in one.names if n != lost))
    return replace(case, sums=sums)


def a_sum_is_made_twice(case: Case, dice: Random) -> Case:
    rank, at = a_sum(case, dice)
    one = case.sums[rank][at]
    return replace(case, sums=[[*row, one] if r in one.ranks else row for r, row in enumerate(case.sums)])


def done_twice(case: Case, dice: Random) -> Case:
    rank, row, at = some(case, dice, dice.choice([REDUCE, STEP, B, W]))
    return case.with_row(rank, [*row[: at + 1], row[at], *row[at + 1 :]])


def two_updates_change_places(case: Case, dice: Random) -> Case:
    rank, row, at = a_step(case, dice)
    update, before = row[at].microbatch, abs(row[at].microbatch - 1)
    other = {update: before, before: update}
    swapped = (replace(a, microbatch=other.get(a.microbatch, a.microbatch)) for a in row if a.kind == STEP)
    return case.with_row(rank, [next(swapped) if a.kind == STEP else a for a in row])


def a_step_is_late_or_early(case: Case, dice: Random) -> Case:
    """Behind a forward that is to use what it makes, or in front of a backward that it is to take."""
    rank, row, at = a_step(case, dice)
    update, every, newer = row[at].microbatch, EVERY, case.updates.rule.version
    steps = [a for a in row if a.kind == STEP and a.microbatch == update]
    rest = [a for a in row if a not in steps]
    if dice.random() < 0.5:
        needs = (n for n, a in enumerate(rest) if n >= at and a.kind == F)
        late = [n for n in needs if newer(rest[n].microbatch, every, update + 1) > update]
        to = late[0] + 1
    else:
        to = max(n for n, a in enumerate(rest) if a.kind in (B, W) and a.microbatch // every == update)
    return case.with_row(rank, [*rest[:to], *steps, *rest[to:]])


def a_share_is_updated_by_two(case: Case, dice: Random) -> Case:
    rank = dice.choice(range(len(case.shares)))
    share = case.shares[rank]
    other = dice.choice([name for name, owner in share.owner.items() if owner != rank])
    claimed = replace(share, owner={**share.owner, other: rank})
    return replace(case, shares=tuple(claimed if r == rank else s for r, s in enumerate(case.shares)))


FAULTS: tuple[Fault, ...] = (
    a_reduction_is_left_out,
    a_sum_loses_a_parameter,
    a_sum_is_made_twice,
    done_twice,
    two_updates_change_places,
    a_step_is_late_or_early,
    a_share_is_updated_by_two,
)


@cache
def cases() -> tuple[Case, ...]:
    made = [make() for make in STEADY.values()]
    return (*made, *(of_library(name) for name in ("1f1b", "zb_h1", "dualpipe", "zb_v")))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: Fault) -> None:
    dice, found = Random(fault.__name__), 0
    while found < 15:
        try:
            changed = fault(dice.choice(cases()), dice)
        except IndexError:
            continue
        with pytest.raises(ScheduleError) as caught:
            changed.prove()
        assert caught.value.hint and "rank" in caught.value.message
        found += 1
