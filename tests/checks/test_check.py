"""Every rule refuses what breaks it, and says who, what and what to do."""

from __future__ import annotations

import pytest

from pipeloom.checks import schedules as rules
from pipeloom.checks.deadlock import Stuck, deadlock
from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.action import KINDS, Action, ActionKind, Kind
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.flow import dag, flow_of
from pipeloom.ir.schedule import Program, Schedule, parse_program, parse_rows
from pipeloom.ir.stages import StageGraph, chain

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def schedule(*rows: str, placement: tuple[int, ...] = (0, 1), microbatches: int = 2) -> Schedule:
    return Schedule(name="hand", microbatches=microbatches, placement=placement, rows=parse_rows(rows))


@pytest.mark.parametrize(
    "rows",
    [
        GOOD,
        ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"),
        ("0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1B1"),
        ("0F0 0F1", "1F0 1F1"),
        ("0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0"),
    ],
)
def test_accepts(rows: tuple[str, ...]) -> None:
    check(schedule(*rows), chain(2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"),
            "rank 0 runs 1F0, but stage 1 is placed on rank 1\nhint: move 1F0 to the row of rank 1",
        ),
        (
            ("0F0 0F1 0B0 0B1 2F0", "1F0 1B0 1F1 1B1"),
            "rank 0 runs 2F0, but the stages are 0 to 1\nhint: correct the stage, or drop the action",
        ),
        (
            ("0F0 0F1 0F2 0B0 0B1", "1F0 1B0 1F1 1B1"),
            "rank 0 runs 0F2, but the micro-batches are 0 to 1\n"
            "hint: correct the micro-batch, or drop the action",
        ),
        (
            ("0F0 0F1 0B0 0B1 0RECOMPUTE1", "1F0 1B0 1F1 1B1"),
            "rank 0 runs 0RECOMPUTE1, whose kind is not a compute action\n"
            "hint: drop it: the memory policy of a plan says what is recomputed",
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1F1"),
            "rank 1 runs 1F1 twice\nhint: remove one of them",
        ),
        (("0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), "rank 0 never runs 0F1\nhint: add 0F1 to its row"),
        (
            ("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"),
            "rank 0 never runs 0B1, nor 0I1 and 0W1\nhint: add 0B1 to its row",
        ),
        (
            ("0F0 0F1 0B0 0I1", "1F0 1B0 1F1 1B1"),
            "rank 0 never runs 0W1\nhint: add 0W1 to its row",
        ),
        (
            ("0F0 0F1 0B0 0W1", "1F0 1B0 1F1 1B1"),
            "rank 0 never runs 0I1\nhint: add 0I1 to its row",
        ),
        (
            ("0F0 0F1 0B0 0B1 0W1", "1F0 1B0 1F1 1B1"),
            "rank 0 runs both 0B1 and 0W1\nhint: keep either 0B1, or 0I1 and 0W1",
        ),
        (
            ("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"),
            "rank 0 runs 0B1 before 0F1, which it needs\nhint: move 0F1 in front of 0B1",
        ),
        (
            ("0F0 0F1 0B0 0W1 0I1", "1F0 1B0 1F1 1B1"),
            "rank 0 runs 0W1 before 0I1, which it needs\nhint: move 0I1 in front of 0W1",
        ),
    ],
)
def test_refuses(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(schedule(*rows), chain(2))
    assert str(caught.value) == message


def test_neighbours_on_one_rank_are_ordered_in_their_row() -> None:
    rows = ("1F0 0F0 1B0 0B0",)
    with pytest.raises(ScheduleError, match="rank 0 runs 1F0 before 0F0, which it needs"):
        check(schedule(*rows, placement=(0, 0), microbatches=1), chain(2))
    rows = ("0F0 1F0 0B0 1I0 1W0",)
    with pytest.raises(ScheduleError, match="rank 0 runs 0B0 before 1I0, which it needs"):
        check(schedule(*rows, placement=(0, 0), microbatches=1), chain(2))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ((0, 1, 1), "the placement names 3 stages, the stage graph has 2"),
        ((0, 2), "stage 1 is placed on rank 2, but the ranks are 0 to 1"),
        ((0, -1), "stage 1 is placed on rank -1, but the ranks are 0 to 1"),
    ],
)
def test_refuses_placements(placement: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(schedule(*GOOD, placement=placement), chain(2))
    assert caught.value.message == message


def test_deadlock_names_the_stuck_action_of_each_rank() -> None:
    with pytest.raises(DeadlockError) as caught:
        check(schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), chain(2))
    assert str(caught.value) == (
        "no rank can move: rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1\n"
        "hint: they wait in a circle, rank 0 -> 1 -> 0: on rank 1 move 1B0 in front of 1F1, "
        "or reorder the others"
    )


def test_deadlock_lists_the_circle_before_those_behind_it() -> None:
    stages = chain(3)
    rows = ("0F0 0B0 0F1 0B1", "1F0 1I0 1F1 1I1 1W0 1W1", "2F0 2F1 2I0 2I1 2W0 2W1")
    with pytest.raises(DeadlockError) as caught:
        check(schedule(*rows, placement=(0, 1, 2)), stages)
    assert caught.value.message == (
        "no rank can move: rank 1 at 1I0 needs 2I0; rank 2 at 2F1 needs 1F1; rank 0 at 0B0 needs 1I0"
    )


def test_deadlock_of_many_ranks_is_cut_short() -> None:
    ranks = [Stuck(rank=r, at=f"{r}F0", needs=f"{(r + 1) % 20}F0", holder=(r + 1) % 20) for r in range(20)]
    assert deadlock(ranks).message.endswith("rank 15 at 15F0 needs 16F0; and 4 more ranks")


def test_gradient_free_edges_need_no_backward_of_the_reader() -> None:
    rows = ("0F0 0B0", "1F0 1B0")
    frozen = dag(2, [(0, 1)], no_gradient=[(0, 1)])
    early = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    check(schedule(*rows, microbatches=1), frozen)
    check(schedule(*early), frozen)
    with pytest.raises(DeadlockError):
        check(schedule(*early), chain(2))


def test_registered_kinds_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = Kind("CHECKTEST")
    monkeypatch.setitem(KINDS, letters, ActionKind(label="a step of a test"))
    row = (*parse_rows(("0F0",))[0], Action(0, letters, 0), *parse_rows(("0B0",))[0])
    check(Schedule(name="hand", microbatches=1, placement=(0,), rows=(row,)), chain(1))
    odd = Schedule(name="hand", microbatches=1, placement=(0,), rows=((Action(0, Kind("NOKIND"), 0), *row),))
    with pytest.raises(ScheduleError, match="0NOKIND0, whose kind is not a compute action"):
        check(odd, chain(1))


def test_a_circle_of_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stages need each other's values in a circle: "):
        flow_of(dag(3, [(0, 1), (1, 2), (2, 1)]))


def test_each_rule_can_be_run_alone() -> None:
    for rule in rules.RULES:
        rule(schedule(*GOOD), flow_of(chain(2)))


PROGRAM = (
    "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP",
    "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1STEP",
)


def program(*rows: str, placement: tuple[int, ...] = (0, 1), microbatches: int = 2) -> Program:
    return parse_program(microbatches, placement, rows)


def edited(rank: int, old: str, new: str) -> Program:
    rows = list(PROGRAM)
    assert old in rows[rank]
    rows[rank] = rows[rank].replace(old, new)
    return program(*rows)


def test_accepts_a_program_and_waits_in_another_order_than_sent() -> None:
    check_program(program(*PROGRAM), chain(2))
    late = edited(1, " 1RECV_F1<0", "").rows[1]
    check_program(program(PROGRAM[0], "1RECV_F1<0 " + " ".join(map(str, late))), chain(2))


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (
            0,
            "0SEND_F1>1",
            "",
            "rank 1 runs 1RECV_F1<0, but rank 0 never runs 0SEND_F1>1\n"
            "hint: add 0SEND_F1>1 to rank 0, or drop 1RECV_F1<0",
        ),
        (
            1,
            "1RECV_F1<0",
            "",
            "rank 0 runs 0SEND_F1>1, but rank 1 never runs 1RECV_F1<0\n"
            "hint: add 1RECV_F1<0 to rank 1, or drop 0SEND_F1>1",
        ),
        (0, "0SEND_F1>1", "0SEND_F1>1 0SEND_F1>1", "rank 0 runs 0SEND_F1>1 twice\nhint: remove one of them"),
        (
            0,
            "0SEND_F1>1",
            "0SEND_B1>1",
            "rank 0 runs 0SEND_B1>1, but no gradients pass that way from stage to stage\n"
            "hint: drop it and its other end",
        ),
        (
            0,
            "0SEND_F1>1",
            "0SEND_F1>7",
            "rank 0 runs 0SEND_F1>7, but no values pass that way from stage to stage\n"
            "hint: drop it and its other end",
        ),
        (
            0,
            "0SEND_F1>1",
            "1SEND_F1>0",
            "rank 0 runs 1SEND_F1>0, but does not hold stage 1\n"
            "hint: move it to the rank of that stage, or drop it",
        ),
        (
            0,
            "0F1 0SEND_F1>1",
            "0SEND_F1>1 0F1",
            "rank 0 runs 0SEND_F1>1 without 0F1 before it\nhint: put 0F1 in front of 0SEND_F1>1",
        ),
        (
            1,
            "1RECV_F1<0 1F1",
            "1F1 1RECV_F1<0",
            "rank 1 runs 1F1 without 1RECV_F1<0 before it\nhint: put 1RECV_F1<0 in front of 1F1",
        ),
        (
            1,
            "1B0 1SEND_B0>0",
            "1SEND_B0>0 1B0",
            "rank 1 runs 1SEND_B0>0 without 1B0 before it\nhint: put 1B0 in front of 1SEND_B0>0",
        ),
        (0, "0B1 0STEP", "0STEP 0B1", "rank 0 runs 0STEP before 0B1\nhint: move 0STEP behind 0B1"),
        (0, "0STEP", "", "rank 0 never runs 0STEP\nhint: add it at the end of the row"),
        (0, "0STEP", "0STEP 0STEP", "rank 0 runs 0STEP twice\nhint: remove one of them"),
        (
            0,
            "0STEP",
            "0REDUCE 0STEP",
            "rank 0 runs 0REDUCE, which has nothing to do there\n"
            "hint: drop it: each trained stage has a STEP; a rank with tied parameters has a REDUCE, "
            "on its lowest such stage",
        ),
        (0, "0F1", "0F1 0F1", "rank 0 runs 0F1 twice\nhint: remove one of them"),
    ],
)
def test_refuses_programs(rank: int, old: str, new: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_program(edited(rank, old, new), chain(2))
    assert str(caught.value) == message


def test_a_program_that_blocks_is_refused() -> None:
    blocking = edited(0, "0F1 0SEND_F1>1 0RECV_B0<1", "0RECV_B0<1 0F1 0SEND_F1>1")
    check_program(blocking, chain(2))
    rows = (blocking.rows[0], program(*PROGRAM).rows[1])
    late = "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP"
    with pytest.raises(DeadlockError) as caught:
        check_program(program(" ".join(map(str, rows[0])), late), chain(2))
    assert str(caught.value) == (
        "no rank can move: rank 0 at 0RECV_B0<1 needs 1SEND_B0>0; rank 1 at 1RECV_F1<0 needs 0SEND_F1>1\n"
        "hint: they wait in a circle, rank 0 -> 1 -> 0: on rank 1 move 1SEND_B0>0 in front of 1RECV_F1<0, "
        "or reorder the others"
    )


def test_messages_between_stages_of_one_rank_are_refused() -> None:
    rows = "0F0 0SEND_F0>1 1RECV_F0<0 1F0 1B0 0B0 0STEP 1STEP"
    with pytest.raises(ScheduleError, match="rank 0 runs 0SEND_F0>1, but holds both stages"):
        check_program(program(rows, placement=(0, 0), microbatches=1), chain(2))


def tied() -> StageGraph:
    return dag(2, [(0, 1)], params={0: ("wte",), 1: ("wte",)})


def tied_program(first: str, second: str) -> Program:
    return program(
        f"0F0 0SEND_F0>1 0RECV_B0<1 0B0 {first}", f"1RECV_F0<0 1F0 1B0 1SEND_B0>0 {second}", microbatches=1
    )


def test_tied_gradients_need_a_sum_before_the_step() -> None:
    check_program(tied_program("0REDUCE 0STEP", "1REDUCE 1STEP"), tied())
    with pytest.raises(ScheduleError, match="rank 1 never runs 1REDUCE"):
        check_program(tied_program("0REDUCE 0STEP", "1STEP"), tied())
    with pytest.raises(ScheduleError, match="rank 1 runs 1REDUCE after 1STEP\nhint: move 1REDUCE in front"):
        check_program(tied_program("0REDUCE 0STEP", "1STEP 1REDUCE"), tied())


def test_a_sum_that_waits_for_a_rank_that_waits_for_it_is_a_deadlock() -> None:
    rows = ("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE 0STEP", "1RECV_F0<0 1F0 1B0 1REDUCE 1SEND_B0>0 1STEP")
    with pytest.raises(DeadlockError) as caught:
        check_program(program(*rows, microbatches=1), tied())
    assert caught.value.message == (
        "no rank can move: rank 0 at 0RECV_B0<1 needs 1SEND_B0>0; rank 1 at 1REDUCE needs 0REDUCE"
    )
