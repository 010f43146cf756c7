"""probe, dawnpiper and vpipe against the dynamic programme, on synthetic chains (tests/support/chains.py)."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product
from math import inf

import chains
import pytest
from random_ops import layered_search

from pipeloom.planner.search.problem import Problem
from pipeloom.planner.strategies.dawnpiper import binary_partition
from pipeloom.planner.strategies.pipedream import move_layers
from pipeloom.planner.strategies.probe import parametric_search

NODES = {2: 24, 3: 28, 4: 28, 5: 28, 7: 28, 8: 28, 12: 40}


def tight_chains(stages: int, mixed: bool, count: int):
    rng = random.Random(stages * 10 + mixed)
    for _ in range(count):
        yield chains.tight(rng, chains.draw(rng, nodes=NODES[stages], stages=stages, mixed=mixed))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 7, 8, 12])
def test_both_find_the_best_cut_where_times_grow_with_the_interval(stages, mixed):
    for chain in tight_chains(stages, mixed, 6):
        best = chains.oracle(chain)
        for search in (parametric_search, binary_partition):
            found = search(chain.problem())
            assert best.cuts and found.seconds == pytest.approx(best.seconds)
            keeps_to_its_word(chain.problem(), found)


def keeps_to_its_word(problem: Problem, found) -> None:
    """Stages are not empty, in order, fit, and take what is said."""
    assert list(found.cuts) == sorted(set(found.cuts))
    assert (found.cuts[0], found.cuts[-1], len(found.cuts)) == (0, problem.last, problem.stages + 1)
    assert problem.weigh(found.cuts).seconds == found.seconds < inf
    for stage, (start, end) in enumerate(zip(found.cuts, found.cuts[1:], strict=False)):
        assert problem.at(start, end, stage).peak_bytes <= problem.caps[stage] * (1 + 1e-12)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("few", "close"), [(0, 1.1), (20_000, 1 + 1e-12)])
def test_with_transfers_probe_is_exact_where_all_is_tried_and_else_close(few, close, mixed, monkeypatch):
    """Crossing times vary from cut to cut, so filling is a heuristic; its worst is within 10 %."""
    monkeypatch.setattr("pipeloom.planner.strategies.probe.FEW", few)
    rng = random.Random(3)
    worst = 1.0
    for chain in tight_chains(4, mixed, 25):
        crossing = (0.0, *(rng.uniform(0.0, 15.0) for _ in chain.times[1:]), 0.0)
        chain = replace(chain, crossing_s=crossing)
        best, found = chains.oracle(chain), parametric_search(chain.problem())
        assert best.cuts and found.cuts
        assert found.seconds >= best.seconds * (1 - 1e-12)
        worst = max(worst, found.seconds / best.seconds)
    assert worst <= close


def test_nothing_is_found_where_nothing_fits_and_all_pieces_where_each_is_a_stage():
    chain = next(tight_chains(4, False, 1))
    full = replace(chains.draw(random.Random(0), nodes=5, stages=5, mixed=True), cap=1e9)
    for problem, cuts in (
        (replace(chain, cap=0.3 * chain.cap), ()),
        (full, (0, 1, 2, 3, 4, 5)),
        (replace(full, stages=6), ()),
    ):
        assert parametric_search(problem.problem()).cuts == cuts
        assert binary_partition(problem.problem()).cuts == cuts


def test_searches_made_of_one_share_what_they_weighed():
    watched = []
    first = replace(layered_search("abcd", 2, 1000), watch=watched.append)
    second, other = replace(first, caps=(1000, 500)), replace(first, in_flight=(3, 1))
    for search, stage in product((first, second, other), (0, 1)):
        search.evaluate(0, 2, stage)
    assert watched == [1, 2, 3, 4]
    assert second.evaluate(0, 2, 0) is first.evaluate(0, 2, 0)
    assert second.evaluate(0, 2, 1) is not first.evaluate(0, 2, 1)
    assert other.evaluate(0, 2, 0).peak_bytes > first.evaluate(0, 2, 0).peak_bytes
    assert other.evaluate(0, 2, 1) is first.evaluate(0, 2, 1)
    freeing, alone = replace(first, treatments=("recompute",)), layered_search("abcd", 2, 1000)
    assert all(own.evaluate(0, 2, 0) is not first.evaluate(0, 2, 0) for own in (freeing, alone))
    assert freeing.ahead(0, 2, 0) is not freeing.evaluate(0, 2, 0)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_moves_of_vpipe_lead_to_no_worse_cut_than_they_start_from_and_to_none_better_than_the_best(stages):
    rng = random.Random(stages)
    for _ in range(10):
        chain = chains.tight(rng, chains.draw(rng, nodes=28, stages=stages, mixed=True))
        problem = chain.problem()
        start = tuple(round(s * 28 / stages) for s in range(stages + 1))
        found, before = move_layers(problem, start), problem.weigh(start).seconds
        assert found.cuts or before == inf
        if found.cuts:
            assert chains.oracle(chain).seconds * (1 - 1e-12) <= found.seconds <= before
            assert all(a < b for a, b in pairwise(found.cuts))


def test_a_move_that_first_makes_things_worse_is_made():
    """From a start where no plan fits, moves lead to one that does."""
    rng = random.Random(1)
    chain = chains.tight(rng, chains.draw(rng, nodes=28, stages=2, mixed=False))
    found = move_layers(chain.problem(), (0, 27, 28))
    assert found.seconds <= 1.05 * chains.oracle(chain).seconds
