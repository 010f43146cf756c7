"""Rules refuse what breaks them, and say who and what to do; `tests/fuzz/test_schedules.py` has more."""

from dataclasses import replace
from functools import partial

import pytest
from refusals import refused
from small import by_hand

from pipeloom.checks.deadlock import Stuck, deadlock
from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.action import F
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.flow import dag, flow_of
from pipeloom.ir.operation import Operation, declare
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.stages import chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules.formats import parse_schedule
from pipeloom.schedules.language.placements import spread

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")

refusal = partial(refused, ScheduleError, check)
refused_program = partial(refused, ScheduleError, check_program)


@pytest.mark.parametrize(
    ("rows", "placement", "words"),
    [
        (("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), (0, 1), "move 1F0 to the row of rank 1"),
        (("0F0 0F1 0B0 0B1 0RECOMPUTE1", GOOD[1]), (0, 1), "whose kind is not a compute action"),
        (("0F0 0B0 0B1", GOOD[1]), (0, 1), "add 0F1"),
        (("0F0 0F1 0B0", GOOD[1]), (0, 1), "never runs 0B1, nor 0I1 and 0W1"),
        (("0F0 0F1 0B0 0B1 0W1", GOOD[1]), (0, 1), "both 0B1 and 0W1"),
        (("0F0 0F1 0B0 0I1", GOOD[1]), (0, 1), "add 0W1"),
        (("0F0 0F1 0B0 0W1", GOOD[1]), (0, 1), "add 0I1"),
        (GOOD, (0, 1, 1), "names 3 stages"),
        (GOOD, (0, 2), "rank 2, but the ranks are 0 to 1"),
        (
            ("", "0F0 0B0", "", "1F0 1B0", ""),
            (1, 3),
            "ranks 0, 2, 4 have no stage: the stages are on ranks",
        ),
        (("0F0 1F0 1B0 0B0", *[""] * 20), (0, 0), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more have no stage"),
    ],
)
def test_refuses(rows: tuple[str, ...], placement: tuple[int, ...], words: str) -> None:
    assert words in refusal(by_hand(*rows, placement=placement, microbatches=2), chain(2))


def test_an_empty_line_of_a_file_is_a_rank_without_a_stage() -> None:
    assert "rank 1 has no stage" in refusal(parse_schedule("0F0,0B0\n\n1F0,1B0\n"), chain(2))


def test_deadlock_names_the_stuck_action_of_each_rank_the_circle_first() -> None:
    rows = ("0F0 0B0 0F1 0B1", "1F0 1I0 1F1 1I1 1W0 1W1", "2F0 2F1 2I0 2I1 2W0 2W1")
    said = refusal(by_hand(*rows), chain(3))
    assert "rank 1 at 1I0 needs 2I0; rank 2 at 2F1 needs 1F1; rank 0 at 0B0 needs 1I0" in said


def test_deadlock_of_many_ranks_is_cut_short() -> None:
    ranks = [Stuck(rank=r, at=f"{r}F0", needs=f"{(r + 1) % 20}F0", holder=(r + 1) % 20) for r in range(20)]
    assert deadlock(ranks).message.endswith("rank 15 at 15F0 needs 16F0; and 4 more ranks")


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


@pytest.mark.parametrize(
    ("rank", "old", "new", "words"),
    [
        (0, "0SEND_F1>1", "", "add 0SEND_F1>1 to rank 0"),
        (0, "0SEND_F1>1", "0SEND_F1>1 0SEND_F1>1", "0SEND_F1>1 twice"),
        (0, "0SEND_F1>1", "0SEND_B1>1", "no gradients pass that way"),
        (0, "0SEND_F1>1", "0SEND_F1>7", "no values pass that way"),
        (0, "0SEND_F1>1", "1SEND_F1>0", "does not hold stage 1"),
        (0, "0STEP", "", "never runs 0STEP"),
        (0, "0STEP", "0REDUCE 0STEP", "0REDUCE, which has nothing to do there"),
        (0, "0F1 0SEND_F1>1", "0SEND_F1>1 0F1", "put 0F1 in front of 0SEND_F1>1"),
        (1, "1RECV_F1<0 1F1", "1F1 1RECV_F1<0", "put 1RECV_F1<0 in front of 1F1"),
        (0, "0B1 0STEP", "0STEP 0B1", "move 0STEP behind 0B1"),
    ],
)
def test_refuses_programs(rank: int, old: str, new: str, words: str) -> None:
    assert words in refused_program(edited(rank, old, new), chain(2))


def test_a_step_is_behind_the_gradients_of_its_update_and_of_no_other() -> None:
    """Micro-batches behind the last whole update are of none."""
    good = "0F0 0B0 0F1 0B1 0STEP0 0F2 0B2"
    check_program(replace(program(good, placement=(0,), microbatches=3), every=2), chain(1))
    late = program(good.replace("0B1 0STEP0", "0STEP0 0B1"), placement=(0,), microbatches=3)
    assert "move 0STEP0 behind 0B1" in refused_program(replace(late, every=2), chain(1))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("1SEND_B0>0 1STEP 1REDUCE", "move 1REDUCE in front"),
        # A sum that waits for a rank that waits for it.
        (
            "1REDUCE 1SEND_B0>0 1STEP",
            "0RECV_B0<1 needs 1SEND_B0>0; rank 1 at 1REDUCE needs 0REDUCE",
        ),
    ],
)
def test_tied_gradients_need_a_sum_before_the_step(second: str, words: str) -> None:
    tied = dag(2, [(0, 1)], params={0: ("wte",), 1: ("wte",)})
    rows = ("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE 0STEP", f"1RECV_F0<0 1F0 1B0 {second}")
    assert words in refused_program(program(*rows, microbatches=1), tied)


def test_a_circle_of_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="circle"):
        flow_of(dag(3, [(0, 1), (1, 2), (2, 1)]))


def test_a_shard_and_a_message_that_wait_for_each_other_are_refused() -> None:
    """Either alone is in order: rank 1 sends behind 3F1, which begins with 0F1, which rank 0 runs behind the
    receive. The simulator came to a stop with a failed assertion."""
    stages, placement = spread(chain(3), ((0, 1), 0, 1))
    rows = (
        "0F0 1RECV_F0<3 1F0 1SEND_F0>2 0F1 1RECV_F1<3 1F1 1SEND_F1>2",
        "3F0 3SEND_F0>1 3F1 3SEND_F1>1 2RECV_F0<1 2F0 2RECV_F1<1 2F1",
    )
    check_program(program(*rows, placement=placement), stages)
    late = program(rows[0], rows[1].replace("3SEND_F0>1 3F1", "3F1 3SEND_F0>1"), placement=placement)
    said = refused(DeadlockError, check_program, late, stages)
    assert "rank 0 at 1RECV_F0<3 needs 3SEND_F0>1; rank 1 at 3F1 needs" in said


def test_what_a_rank_stands_at_is_not_to_be_moved_in_front_of_itself() -> None:
    """Rank 0 lacks 2F0, where rank 1 stands already: 1F1, which begins with it, lacks 0F1. It said "on rank 1
    move 2F0 in front of 2F0"."""
    rows = ("0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1", "1F0 2F0&1F1 2F1 2B0 2B1 1B0 1B1")
    schedule = by_hand(*rows, placement=(0, 1, 1, 0))
    said = refused(DeadlockError, check, schedule, chain(4))
    assert "rank 0 at 3F0 needs 2F0; rank 1 at 2F0 needs 0F1" in said
    assert "on rank 1 let 2F0 begin alone" in said
    check(replace(schedule, pairs=()), chain(4))


declare(
    Operation(letters="MEETBUG", meaning="both stages", after=F, meets=lambda stage: (1 - stage,), seconds=1)
)


def test_who_waits_for_gradients_in_front_of_a_meeting_is_told() -> None:
    made = lower(by_hand("0F0 0MEETBUG0 0B0", "1F0 1MEETBUG0 1B0"), chain(2))
    check_program(made, chain(2))
    first, second = (" ".join(map(str, row)) for row in made.rows)
    early = first.replace(" 0RECV_B0<1", "").replace("0MEETBUG0", "0RECV_B0<1 0MEETBUG0")
    said = refused(DeadlockError, check_program, program(early, second, microbatches=1), chain(2))
    assert "rank 0 at 0RECV_B0<1 needs 1SEND_B0>0; rank 1 at 1MEETBUG0 needs 0RECV_B0<1" in said
