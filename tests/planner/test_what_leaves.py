"""What leaves where a schedule copies: all but what is small, or cheaper to make again than to copy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from random_stages import random_model

from pipeloom.ir.stages import cut
from pipeloom.planner.stage_cost.treated_stage import cost_treatments, host_copies, offload_all


@pytest.fixture(autouse=True)
def small_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models have a few elements per value."""
    monkeypatch.setattr("pipeloom.planner.stage_cost.treated_stage.SMALL", 0)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_what_is_made_again_takes_less_than_its_copies_and_draws_nothing(seed: int) -> None:
    model = random_model(seed, 8)
    ops = [op.name for op in model.readers.ops]
    stages = cut(model.graph, {name: int(place >= 7) for place, name in enumerate(ops)})
    treatments = offload_all(model, stages, 0)
    copies = host_copies(model, 0)
    assert copies is not None and set(treatments.values()) <= {"offload", "recompute"}
    footprint = model.stage_footprint(stages, 0)
    whole = cost_treatments(model, footprint, range(7), 0, treatments)  # refuses what cannot be made again
    assert whole.footprint.residuals >= 0
    for name, how in treatments.items():
        alone = cost_treatments(model, footprint, range(7), 0, {name: "offload"})
        if how == "recompute":
            again = cost_treatments(model, footprint, range(7), 0, {name: "recompute"})
            assert again.recompute_s < alone.offload_s + alone.reload_s


def test_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.planner.stage_cost.treated_stage.SMALL", 1 << 40)
    model = random_model(3, 8)
    ops = [op.name for op in model.readers.ops]
    stages = cut(model.graph, {name: int(place >= 7) for place, name in enumerate(ops)})
    named = {value for op in model.readers.ops[:7] for value in (o.name for o in op.outputs)}
    assert not named & set(offload_all(model, stages, 0))
