"""Which residuals are kept, as checkpoints of what is recomputed."""

from math import inf

import pytest
from exact_treatments import exact
from random_stages import chain_model, random_model

from pipeloom.planner.stage_cost.recompute_liveness import KEEP
from pipeloom.planner.treatments.checkpoints import choose_checkpoints
from pipeloom.planner.treatments.choose import treat_interval
from pipeloom.planner.treatments.greedy import choose_greedily


@pytest.mark.parametrize(
    ("seed", "ops", "in_flight", "share"),
    [
        (801710, 21, 1, 0.7011181581941688),
        (782070, 20, 4, 0.4470034551904057),
        (812158, 7, 1, 0.9398580033433368),
    ],
)
def test_what_the_exact_choice_fits_fits(seed, ops, in_flight, share):
    model = random_model(seed, ops)
    free = treat_interval(model, 0, ops - 1, 0, in_flight=in_flight, cap=inf)
    best, found = (
        treat_interval(model, 0, ops - 1, 0, in_flight=in_flight, cap=share * free.peak_bytes, solve=solve)
        for solve in (exact, choose_greedily)
    )
    assert best.fits and found.fits
    assert best.seconds * (1 - 1e-9) <= found.seconds <= 1.2 * best.seconds


@pytest.mark.slow
def test_checkpoints_are_chosen_together():
    """A chain of equal ops: some choice keeps no more than about the root of twice its results."""
    ops = 45
    sizes = []

    def look(task):
        sizes.extend(
            (task.moments.peak(c), int((c == KEEP).sum())) for c in choose_checkpoints(task.moments, task.may)
        )
        return choose_greedily(task)

    model = chain_model(ops)
    treat_interval(model, 0, ops, 0, in_flight=1, cap=20 * 400, solve=look)
    least, kept = min(sizes)
    assert least <= 400 * ((2 * ops) ** 0.5 + 4)
    assert 1 < kept < 2 * (2 * ops) ** 0.5
    assert len(set(sizes)) > 3
