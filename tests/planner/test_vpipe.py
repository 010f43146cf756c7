"""Kernighan-Lin moves of layers."""

import random
from itertools import pairwise

import chains
import pytest

from pipeloom.planner.strategies.vpipe import _state, move_layers, one_pass


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_each_pass_keeps_its_best_prefix_and_never_gets_worse(stages):
    rng = random.Random(stages)
    for _ in range(10):
        chain = chains.tight(rng, chains.draw(rng, nodes=28, stages=stages, mixed=True))
        problem = chain.problem()
        cuts = tuple(round(s * 28 / stages) for s in range(stages + 1))
        state, after = one_pass(problem, cuts)
        assert state <= _state(problem, cuts)
        assert state == _state(problem, after)
        found = move_layers(problem, cuts)
        assert not found.cuts or (found.seconds,) >= (chains.oracle(chain).seconds * (1 - 1e-12),)
        assert all(a < b for a, b in pairwise(after))


def test_a_move_that_first_makes_things_worse_is_made():
    """From a start where no plan fits, moves lead to one that does."""
    rng = random.Random(1)
    chain = chains.tight(rng, chains.draw(rng, nodes=28, stages=2, mixed=False))
    found = move_layers(chain.problem(), (0, 27, 28))
    assert found.seconds <= 1.05 * chains.oracle(chain).seconds


def test_a_single_stage():
    chain = chains.draw(random.Random(0), nodes=4, stages=1, mixed=False)
    assert move_layers(chain.problem(), (0, 4)).cuts == (0, 4)
