"""Programs against their pictures: which messages stand where, and what closes a row."""

from __future__ import annotations

import pytest
from receives import receives_ahead

from pipeloom.ir import dependencies
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule, parse_program, parse_rows
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.ir.tied_gradients import reductions
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry


def lowered(
    name: str, stages: StageGraph, placement: tuple[int, ...], microbatches: int, *, split: bool = False
) -> str:
    program = lower(registry.build(name, stages, placement, microbatches, split_backward=split), stages)
    text = str(program)
    again = parse_program(microbatches, placement, tuple(text.splitlines()))
    assert again == program
    return text


def test_chain() -> None:
    assert lowered("1f1b", chain(2), (0, 1), 2) == (
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP\n"
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1STEP"
    )


def test_the_gradient_leaves_before_w() -> None:
    assert lowered("gpipe", chain(2), (0, 1), 1, split=True) == (
        "0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0STEP\n1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1STEP"
    )


def test_evaluation_has_neither_gradients_nor_steps() -> None:
    tied = dag(2, [(0, 1)], params={0: ("wte",), 1: ("wte",)})
    assert lowered("forward_only", tied, (0, 1), 1) == "0F0 0SEND_F0>1\n1RECV_F0<0 1F0"


def test_skip_connection_goes_straight_and_nearest_first() -> None:
    skip = dag(3, [(0, 2), (0, 1), (1, 2)])
    assert lowered("gpipe", skip, (0, 1, 2), 1) == (
        "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<2 0RECV_B0<1 0B0 0STEP\n"
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1STEP\n"
        "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1 2SEND_B0>0 2STEP"
    )


def test_edges_without_gradients_are_one_way() -> None:
    mask = dag(3, [(0, 1), (1, 2), (0, 2)], no_gradient=[(0, 2)])
    assert lowered("gpipe", mask, (0, 1, 2), 1) == (
        "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<1 0B0 0STEP\n"
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1STEP\n"
        "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1 2STEP"
    )


def test_stages_of_one_rank_exchange_no_messages() -> None:
    assert lowered("gpipe", chain(3), (0, 0, 1), 1) == (
        "0F0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 0B0 0STEP 1STEP\n2RECV_F0<1 2F0 2B0 2SEND_B0>1 2STEP"
    )


def test_stage_numbers_need_not_follow_the_flow() -> None:
    assert lowered("1f1b", dag(2, [(1, 0)], loss_stage=0), (0, 1), 1) == (
        "0RECV_F0<1 0F0 0B0 0SEND_B0>1 0STEP\n1F0 1SEND_F0>0 1RECV_B0<0 1B0 1STEP"
    )


def test_one_sum_per_rank_with_tied_parameters() -> None:
    tied = dag(4, [(0, 1), (1, 2), (2, 3)], params={0: ("wte",), 1: ("a",), 2: ("a",), 3: ("wte", "lone")})
    rows = lowered("gpipe", tied, (0, 1, 1, 2), 1).splitlines()
    assert [[word for word in row.split() if word.endswith(("REDUCE", "STEP"))] for row in rows] == [
        ["0REDUCE", "0STEP"],
        ["1REDUCE", "1STEP", "2STEP"],
        ["3REDUCE", "3STEP"],
    ]
    assert [[(r.names, r.stages, r.ranks) for r in rank] for rank in reductions(tied, (0, 1, 1, 2))] == [
        [(("wte",), (0, 3), (0, 2))],
        [(("a",), (1, 2), (1,))],
        [(("wte",), (0, 3), (0, 2))],
    ]


def test_ranks_sum_all_that_they_share_at_once() -> None:
    """Sums stage by stage would block here: rank 0 would start with x, rank 1 with y."""
    tied = dag(4, [(0, 1), (1, 2), (2, 3)], params={0: ("x",), 1: ("y",), 2: ("y",), 3: ("x",)})
    lowered("gpipe", tied, (0, 0, 1, 1), 2)
    assert [[r.names for r in rank] for rank in reductions(tied, (0, 0, 1, 1))] == [[("x", "y")]] * 2


def test_refuses_what_the_checks_refuse() -> None:
    def by_hand(*rows: str) -> Schedule:
        return Schedule(name="hand", microbatches=2, placement=(0, 1), rows=parse_rows(rows))

    with pytest.raises(ScheduleError, match="rank 0 never runs 0F1"):
        lower(by_hand("0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), chain(2))
    with pytest.raises(DeadlockError, match="rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1"):
        lower(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), chain(2))


def test_receives_that_must_be_posted_ahead() -> None:
    def ahead(name: str, stages: StageGraph, placement: tuple[int, ...]) -> dict[tuple[int, int], int]:
        return receives_ahead(lower(registry.build(name, stages, placement, 4), stages))

    assert ahead("1f1b", chain(3), (0, 1, 2)) == {(0, 1): 1, (1, 2): 1, (1, 0): 1, (2, 1): 1}
    # Stages 0 and 1 both feed stage 2, which waits for them in turn while rank 0 sends in its own order.
    assert set(ahead("gpipe", dag(3, [(0, 2), (1, 2)]), (0, 0, 1)).values()) == {1}


def test_work_per_action_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what the checks ask per action, in two sizes: near-linear time without a stopwatch."""
    from pipeloom.checks import schedules as check
    from pipeloom.schedules import registry

    calls = 0
    original = dependencies.needs

    def counted(*args):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return original(*args)

    monkeypatch.setattr(check, "needs", counted)
    per_action = []
    for ranks in (4, 16):
        calls = 0
        made = registry.build("1f1b", chain(ranks), tuple(range(ranks)), 2 * ranks)
        lower(made, chain(ranks))
        per_action.append(calls / sum(map(len, made.rows)))
    assert per_action[0] == per_action[1]
