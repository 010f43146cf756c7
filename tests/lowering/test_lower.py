"""Programs against their pictures: which messages stand where, and what closes a row."""

import pytest
from small import by_hand

from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import parse_program
from pipeloom.ir.shared_weights import reductions
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry


def lowered(name: str, stages: StageGraph, placement: tuple[int, ...], microbatches: int) -> str:
    """A name may end in " split"."""
    family, _, split = name.partition(" ")
    made = registry.build(family, stages, placement, microbatches, split_backward=bool(split))
    program = lower(made, stages)
    assert parse_program(microbatches, placement, tuple(str(program).splitlines())) == program
    return str(program)


@pytest.mark.parametrize(
    ("name", "stages", "placement", "microbatches", "rows"),
    [
        (
            "1f1b",
            chain(2),
            (0, 1),
            2,
            "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP\n"
            "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1STEP",
        ),
        (  # the gradient leaves before W
            "gpipe split",
            chain(2),
            (0, 1),
            1,
            "0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0STEP\n1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1STEP",
        ),
        (  # a skip connection goes straight, and the nearest goes first
            "gpipe",
            dag(3, [(0, 2), (0, 1), (1, 2)]),
            (0, 1, 2),
            1,
            "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<2 0RECV_B0<1 0B0 0STEP\n"
            "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1STEP\n"
            "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1 2SEND_B0>0 2STEP",
        ),
    ],
)
def test_pictures(name, stages, placement, microbatches, rows) -> None:
    assert lowered(name, stages, placement, microbatches) == rows


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
