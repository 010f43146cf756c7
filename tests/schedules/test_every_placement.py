"""Every family on every kind of placement: a schedule that passes the checks, or a refusal with its reason.

Never a deadlock: nobody who writes a placement can mend one.
"""

from itertools import product
from typing import Any

import pytest

from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.stages import StageGraph, chain, replicate
from pipeloom.schedules import registry
from pipeloom.schedules.language.placements import both_ways, loop, spread, wave

DIAMOND = dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])

TOWERS = dag(5, [(0, 1), (1, 4), (2, 3), (3, 4)])

PLACED: dict[str, tuple[StageGraph, tuple[int, ...]]] = {
    "one rank": (chain(1), (0,)),
    "line": (chain(3), loop(3)),
    "line backwards": (chain(3), (2, 1, 0)),
    "loop of 2": (chain(6), loop(3, 2)),
    "loop of 4": (chain(8), loop(2, 4)),
    "V": (chain(6), wave(3)),
    "W": (chain(6), wave(2, 3)),
    "neighbours": (chain(4), (0, 0, 1, 1)),
    "two on the first": (chain(4), (0, 0, 1, 2)),
    "two on the last": (chain(4), (0, 1, 2, 2)),
    "back to the first": (chain(4), (0, 1, 2, 0)),
    "both ways": (replicate(chain(4), 2), both_ways(4)),
    "both ways on one line": (replicate(chain(3), 2), loop(3, 2)),
    "diamond": (DIAMOND, loop(4)),
    "diamond on two": (DIAMOND, (0, 1, 1, 0)),
    "towers": (TOWERS, loop(5)),
    "towers on three": (TOWERS, (0, 0, 1, 1, 2)),
    "towers on two": (TOWERS, (0, 1, 0, 1, 1)),
    "stage on two ranks": spread(chain(3), (0, (1, 2), 3)),
    "first stage on two ranks": spread(chain(3), ((0, 1), 2, 3)),
    "last stage on two ranks": spread(chain(3), (0, 1, (2, 3))),
    "stage on all ranks": spread(chain(3), ((0, 1), 0, 1)),
}


def times(stages: int, *, even: bool) -> dict[str, Any]:
    """Equal times and no messages; or stages of three lengths, with messages."""
    if even:
        return {"costs": equal_costs(stages)}
    costs = tuple(
        StageCost(forward_s=(1.0, 0.7, 1.2)[s % 3], backward_s=1.5, input_grad_s=0.9, weight_grad_s=0.6)
        for s in range(stages)
    )
    return {"costs": costs, "transfer_s": 0.3}


ANY = {"gpipe", "1f1b", "zb_h1", "zb_2p", "eager_1f1b"}
ON_DAGS = {
    "diamond": {"zb_h1", "zb_2p", "eager_1f1b", "async_1f1b"},
    "diamond on two": {"zb_v", "v_half", "v_min", "hanayo"},
    "stage on two ranks": ANY,
    "first stage on two ranks": ANY,
    "last stage on two ranks": ANY,
}
"""Families that may not refuse a placement."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("even", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["even", "uneven"])
@pytest.mark.parametrize("where", PLACED)
def test_all_run_or_say_why_not(where: str, even: bool) -> None:
    graph, placement = PLACED[where]
    for name, microbatches in product(registry.names(), (1, 4)):
        try:
            each = times(len(placement), even=even)
            made = registry.build(name, graph, placement, microbatches, **each)
        except ScheduleError as error:
            assert not isinstance(error, DeadlockError), f"{name}: {error}"
            assert error.message and error.hint and name not in ON_DAGS.get(where, ()), name
        else:
            count = 1 if name == "forward_only" else 2
            assert sum(map(len, made.rows)) >= count * microbatches * len(placement), name
