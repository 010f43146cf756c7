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
from pipeloom.ir.action import REDUCE, STEP, Action, B, F, W
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.plan import Plan, StagePlan, widened
from pipeloom.ir.schedule import Program
from pipeloom.ir.stages import StageGraph, chain, replicate
from pipeloom.ir.weights import FLUSH, OptimizerShares, Updates, optimizer_shares
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
    return replace(
        stages,
        params=tuple(
            (
                *(("wte",) if tied and stages.origin(s) in ends else ()),
                *(f"{stages.origin(s)}.{n}" for n in "ab"),
            )
            for s in range(len(stages.stages))
        ),
    )


def of_library(name: str, *, tied: bool = True) -> Case:
    """With a flush, in the usual placement."""
    stages, placement = registry.default_placement(name, 4)
    stages = named(stages, tied=tied)
    program = lower(registry.build(name, stages, placement, 8), stages)
    return Case(program, stages, None, sums_of(stages, placement))


def steady(
    policy: str,
    *,
    name: str = "1f1b",
    ranks: int = 3,
    width: int = 1,
    tied: bool = False,
    shards: bool = False,
    clips: bool = False,
) -> Case:
    """Without a flush; `width` pipelines side by side, which may share out the optimizer's state."""
    shape, placement = registry.default_placement(name, ranks)
    updates = Updates(policy=policy, every=EVERY)
    body = build_steady(name, named(shape, tied=tied), placement, updates)
    one = Plan(
        graph="",
        planner="",
        stages=tuple(StagePlan(ops=stage.ops) for stage in shape.stages),
        placement=placement,
        schedule=name,
        schedule_rows=tuple(str(body).splitlines()),
        microbatches=EVERY,
        weights=policy,
    )
    plan = widened(one, width)
    stages = plan.replicated(named(shape, tied=tied))
    sizes = {name: 4 for names in stages.params for name in names}
    shares = optimizer_shares(stages, plan.placement, sizes) if shards else ()
    program = lower(plan.as_schedule, stages, updates=plan.updates, clips=clips)
    return Case(program, stages, plan.updates, sums_of(stages, plan.placement, shares), shares)


def flushed_pipelines() -> Case:
    """Two with a flush that share out the optimizer's state."""
    stages = replicate(named(chain(2), tied=True), 2)
    plan = Plan(
        graph="",
        planner="",
        stages=(StagePlan(ops=("a",)), StagePlan(ops=("b",))),
        placement=(0, 1),
        schedule="1f1b",
        schedule_rows=tuple(str(registry.build("1f1b", chain(2), (0, 1), 4)).splitlines()),
        microbatches=4,
    )
    wide = widened(plan, 2)
    shares = optimizer_shares(stages, wide.placement, {n: 4 for names in stages.params for n in names})
    program = lower(wide.as_schedule, stages)
    return Case(program, stages, None, sums_of(stages, wide.placement, shares), shares)


STEADY: dict[str, Callable[[], Case]] = {
    "2bw": lambda: steady("2bw"),
    "2bw, tied, clipped": lambda: steady("2bw", tied=True, clips=True),
    "2bw, two pipelines": lambda: steady("2bw", width=2, tied=True),
    "2bw, state shared out": lambda: steady("2bw", width=2, tied=True, shards=True),
    "2bw, zb_h1": lambda: steady("2bw", name="zb_h1"),
    "2bw, two stages a rank": lambda: steady("2bw", name="interleaved_1f1b", ranks=2, tied=True),
    "stash": lambda: steady("stash"),
    "stash, two pipelines": lambda: steady("stash", width=2),
    "flush, state shared out": flushed_pipelines,
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

Fault = Callable[[Case, Random], Case | None]
"""None where the case has nothing to change so."""


def rank_with(case: Case, dice: Random, kind: object) -> tuple[int, list[Action], int] | None:
    """A row, and the place in it of an action of a kind."""
    places = [
        (rank, at)
        for rank, row in enumerate(case.program.rows)
        for at, action in enumerate(row)
        if action.kind == kind
    ]
    if not places:
        return None
    rank, at = dice.choice(places)
    return rank, [*case.program.rows[rank]], at


def a_reduction_is_left_out(case: Case, dice: Random) -> Case | None:
    if dice.random() < 0.5:
        return a_sum_loses_a_parameter(case, dice)
    if (found := rank_with(case, dice, REDUCE)) is None:
        return None
    rank, row, at = found
    return case.with_row(rank, row[:at] + row[at + 1 :])


def a_sum_loses_a_parameter(case: Case, dice: Random) -> Case | None:
    ranks = [rank for rank, row in enumerate(case.sums) if any(len(one.ranks) > 1 for one in row)]
    if not ranks:
        return None
    rank = dice.choice(ranks)
    row = [*case.sums[rank]]
    at = dice.choice([at for at, one in enumerate(row) if len(one.ranks) > 1])
    name = dice.choice(row[at].names)
    row[at] = replace(row[at], names=tuple(n for n in row[at].names if n != name))
    return replace(case, sums=[row if r == rank else old for r, old in enumerate(case.sums)])


def done_twice(case: Case, dice: Random) -> Case | None:
    kind = dice.choice([REDUCE, STEP, B, W])
    if kind == REDUCE and dice.random() < 0.5:
        ranks = [rank for rank, row in enumerate(case.sums) if any(len(one.ranks) > 1 for one in row)]
        if not ranks:
            return None
        rank = dice.choice(ranks)
        one = dice.choice([one for one in case.sums[rank] if len(one.ranks) > 1])
        sums = [[*row, one] if r in one.ranks else row for r, row in enumerate(case.sums)]
        return replace(case, sums=sums)
    if (found := rank_with(case, dice, kind)) is None:
        return None
    rank, row, at = found
    return case.with_row(rank, [*row[: at + 1], row[at], *row[at + 1 :]])


def a_wrong_version(case: Case, dice: Random) -> Case | None:
    """A STEP comes behind a forward that is to use what it makes, or in front of a backward that it is to
    take; or two updates change places."""
    if case.updates is None or (found := rank_with(case, dice, STEP)) is None:
        return None
    rank, row, at = found
    update, every = row[at].microbatch, case.updates.every
    together = [n for n, a in enumerate(row) if a.kind == STEP and a.microbatch == update]
    steps = [row[n] for n in together]
    rest = [a for n, a in enumerate(row) if n not in together]
    way = dice.choice(["late", "early", "swapped"])
    if way == "swapped":
        other = update + 1 if update == 0 else update - 1
        numbers = {update: other, other: update}
        return case.with_row(
            rank,
            [
                replace(a, microbatch=numbers.get(a.microbatch, a.microbatch)) if a.kind == STEP else a
                for a in row
            ],
        )
    if way == "late":
        newer = case.updates.rule.version
        needs = [
            n
            for n, a in enumerate(rest)
            if n >= at and a.kind == F and newer(a.microbatch, every, update + 1) > update
        ]
        if not needs:
            return None
        to = needs[0] + 1
    else:
        to = max(n for n, a in enumerate(rest) if a.kind in (B, W) and a.microbatch // every == update)
    return case.with_row(rank, [*rest[:to], *steps, *rest[to:]])


def a_share_is_updated_by_two(case: Case, dice: Random) -> Case | None:
    if not case.shares:
        return None
    rank = dice.randrange(len(case.shares))
    share = case.shares[rank]
    others = [name for name, owner in share.owner.items() if owner != rank]
    if not others:
        return None
    claimed = replace(share, owner={**share.owner, dice.choice(others): rank})
    return replace(case, shares=tuple(claimed if r == rank else s for r, s in enumerate(case.shares)))


FAULTS: tuple[Fault, ...] = (a_reduction_is_left_out, done_twice, a_wrong_version, a_share_is_updated_by_two)


@cache
def cases() -> tuple[Case, ...]:
    made = [make() for make in STEADY.values()]
    return (*made, *(of_library(name) for name in ("1f1b", "zb_h1", "dualpipe", "zb_v")))


@pytest.mark.parametrize("seed", range(100))
def test_a_fault_is_found(seed: int) -> None:
    dice = Random(seed)
    changed, fault = None, FAULTS[seed % len(FAULTS)]
    while changed is None:
        case = dice.choice(cases())
        changed = fault(case, dice)
    with pytest.raises(ScheduleError) as caught:
        changed.prove()
    assert caught.value.hint and "rank" in caught.value.message, fault.__name__
