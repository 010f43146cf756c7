"""Programs against their pictures: which messages stand where, and what closes a row."""

from itertools import product

import pytest
from small import built, by_hand

from pipeloom.ir.action import AWAIT, OFFLOAD, RECOMPUTE, RELOAD, Action, B, F, I
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.memory_policy import KEEP_ALL, MemoryPolicy
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.shared_weights import reductions
from pipeloom.ir.stages import StageGraph, chain, replicate
from pipeloom.lowering.passes import lower
from pipeloom.planner.placement import stages_for
from pipeloom.schedules import registry

BOTH = MemoryPolicy(stages=({"a": "offload", "b": "recompute", "c": "keep"}, {"a": "offload"}), ahead=(0, 1))


def lowered(name: str, microbatches: int, stages: StageGraph | None = None, policy=KEEP_ALL) -> str:
    """A name may end in " split"."""
    family, _, split = name.partition(" ")
    stages = stages or chain(2)
    placement = tuple(range(len(stages.stages)))
    made = registry.build(family, stages, placement, microbatches, split_backward=bool(split))
    program = lower(made, stages, policy=policy)
    assert parse_program(microbatches, placement, tuple(str(program).splitlines())) == program
    return str(program)


def test_the_gradient_leaves_before_w() -> None:
    assert lowered("1f1b split", 2) == (
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0I0 0W0 0RECV_B1<1 0I1 0W1 0STEP\n"
        "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1RECV_F1<0 1F1 1I1 1SEND_B1>0 1W1 1STEP"
    )


def test_a_skip_connection_goes_straight_and_the_nearest_goes_first() -> None:
    assert lowered("gpipe", 1, dag(3, [(0, 2), (0, 1), (1, 2)])) == (
        "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<2 0RECV_B0<1 0B0 0STEP\n"
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1STEP\n"
        "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1 2SEND_B0>0 2STEP"
    )


def test_one_sum_per_rank_with_tied_parameters() -> None:
    tied = dag(4, [(0, 1), (1, 2), (2, 3)], params={0: ("wte",), 1: ("a",), 2: ("a",), 3: ("wte", "lone")})
    assert [[(r.names, r.stages, r.ranks) for r in rank] for rank in reductions(tied, (0, 1, 1, 2))] == [
        [(("wte",), (0, 3), (0, 2))],
        [(("a",), (1, 2), (1,))],
        [(("wte",), (0, 3), (0, 2))],
    ]


def test_refuses_what_the_checks_refuse() -> None:
    with pytest.raises(ScheduleError, match="rank 0 never runs 0F1"):
        lower(by_hand("0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), chain(2))


def test_a_reload_runs_beside_the_action_before_and_a_recomputation_while_waiting() -> None:
    assert lowered("1f1b", 3, policy=BOTH) == (
        "0F0 0SEND_F0>1 0OFFLOAD0 0RELOAD0 0F1 0SEND_F1>1 0OFFLOAD1 0RECOMPUTE0 0RECV_B0<1 0B0 "
        "0RELOAD1 0F2 0SEND_F2>1 0OFFLOAD2 0RECOMPUTE1 0RECV_B1<1 0RELOAD2 0B1 0RECOMPUTE2 0RECV_B2<1 0B2 "
        "0STEP\n"
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1RECV_F2<0 1F2 1B2 1SEND_B2>0 1STEP"
    )


def test_no_more_than_three_are_on_the_device_however_slow_copies_are() -> None:
    assert lowered("gpipe", 5, policy=BOTH).splitlines()[1] == (
        "1RECV_F0<0 1F0 1OFFLOAD0 1RECV_F1<0 1F1 1OFFLOAD1 1RECV_F2<0 1F2 1OFFLOAD2 1AWAIT0 1RECV_F3<0 1F3 "
        "1OFFLOAD3 1AWAIT2 1RECV_F4<0 1AWAIT1 1RELOAD0 1F4 1OFFLOAD4 1AWAIT3 1RELOAD1 1B0 1SEND_B0>0 "
        "1RELOAD2 1B1 1SEND_B1>0 1RELOAD3 1B2 1SEND_B2>0 1RELOAD4 1B3 1SEND_B3>0 1B4 1SEND_B4>0 1STEP"
    )


def test_copies_of_a_schedule_stay_and_its_stages_get_no_others() -> None:
    given = by_hand("0F0 0OFFLOAD0 0F1 0AWAIT0 0F2 0RELOAD0 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    policy = MemoryPolicy(stages=({"a": "offload"}, {"a": "offload"}))
    first, second = str(lower(given, chain(2), policy=policy)).splitlines()
    assert first == (
        "0F0 0SEND_F0>1 0OFFLOAD0 0F1 0SEND_F1>1 0AWAIT0 0F2 0SEND_F2>1 0RELOAD0 0RECV_B0<1 0B0 0RECV_B1<1 "
        "0B1 0RECV_B2<1 0B2 0STEP"
    )
    assert "1RELOAD2 1B1" in second


def test_copies_of_a_stage_that_offloads_nothing_are_left_out() -> None:
    given = by_hand("0F0 0OFFLOAD0 0F1 0AWAIT0 0RELOAD0 0B0 0B1", "1F0 1OFFLOAD0 1F1 1RELOAD0 1B0 1B1")
    policy = MemoryPolicy(stages=({"a": "offload"}, {"a": "recompute"}))
    first, second = str(lower(given, chain(2), policy=policy)).splitlines()
    assert "0OFFLOAD0 " in first and "0AWAIT0 0RELOAD0" in first and "OFFLOAD" not in second
    assert "1OFFLOAD0" in str(lower(given, chain(2))), "a program that is only simulated keeps them"


def test_around_a_pair_they_stand_as_around_one_action() -> None:
    schedule = by_hand("0F0 0F1 0B0 0F2&0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    first, _ = str(lower(schedule, chain(2), policy=BOTH)).splitlines()
    assert first.endswith(
        "0RECOMPUTE0 0RECV_B0<1 0RELOAD1 0B0 0RECOMPUTE1 0RECV_B1<1 0F2&0B1 0SEND_F2>1 "
        "0RECOMPUTE2 0RECV_B2<1 0B2 0STEP"
    )


def test_replicas_are_treated_as_their_first() -> None:
    stages = replicate(chain(1), 2)
    schedule = registry.build("gpipe", stages, (0, 1), 1)
    policy = MemoryPolicy(stages=({"a": "recompute"},), ahead=(0,))
    rows = ("0F0 0RECOMPUTE0 0B0 0STEP", "1F0 1RECOMPUTE0 1B0 1STEP")
    assert str(lower(schedule, stages, policy=policy)) == "\n".join(rows)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("1f1b", MemoryPolicy(stages=({"a": "recompute"},))),  # inside its backward
        ("1f1b", MemoryPolicy(stages=({"a": "keep"}, {}))),
        ("forward_only", BOTH),
    ],
)
def test_without_residuals_to_treat_the_program_is_the_same(name: str, policy: MemoryPolicy) -> None:
    assert lower(built(name, 2, 4), chain(2), policy=policy) == lower(built(name, 2, 4), chain(2))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "dualpipev"])
def test_every_schedule(name: str) -> None:
    """Each once, in order, around F and B; and nothing else has moved."""
    count, microbatches = stages_for(name, 2), 4
    where = tuple(range(count)) if count == 2 else (0, 1, 1, 0) if name.endswith("v") else (0, 1, 0, 1)
    stages = chain(count)
    treated = ({"a": "offload", "b": "recompute"}, {"a": "offload"}, {"b": "recompute"}, {})
    policy = MemoryPolicy(stages=treated[:count], ahead=(0, 1))
    schedule = registry.build(name, stages, where, microbatches)
    program = lower(schedule, stages, policy=policy)
    assert without_copies(program) == tuple(tuple(row) for row in lower(schedule, stages).rows)
    place = {step: at for row in program.rows for at, step in enumerate(row)}
    for stage, microbatch in product(range(count), range(microbatches)):
        at = {
            k: place.get(Action(stage, k, microbatch)) for k in (F, B, I, OFFLOAD, AWAIT, RELOAD, RECOMPUTE)
        }
        back = at[B] if at[B] is not None else at[I]
        assert (at[OFFLOAD] is None) == (at[RELOAD] is None)
        assert at[OFFLOAD] is None or "a" in treated[stage]
        assert (at[RECOMPUTE] is not None) == ("b" in treated[stage] and stage in policy.ahead)
        known = [at[F], at[OFFLOAD], at[AWAIT], at[RELOAD], back]
        found = [a for a in known if a is not None]
        assert found == sorted(found)
        if at[RECOMPUTE] is not None:
            assert at[F] < at[RECOMPUTE] < back and (at[RELOAD] or 0) < at[RECOMPUTE]
            following = program.rows[where[stage]][at[RECOMPUTE] + 1]
            assert following.is_transfer or place[following] <= back


def without_copies(program: Program) -> tuple[tuple[object, ...], ...]:
    return tuple(
        tuple(step for step in row if step.kind not in (OFFLOAD, AWAIT, RELOAD, RECOMPUTE))
        for row in program.rows
    )
