"""Pipelines that do not drain: drained, saved and loaded anywhere, also at another depth and width."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from version_ranks import RANKS, SHAPES, Script, Segment, ends_at, walk

from pipeloom.runtime.launch.launch import launch

EACH_ONCE: Script = tuple(
    Segment(shape, steps, frozenset({steps.start}), spoils=True)
    for shape, steps in zip(((2, 1), (4, 1), (2, 2), (1, 1)), ends_at((2, 4, 6)), strict=True)
)
"""Saved at depth 2, loaded at 4, then by two pipelines side by side, and by one process."""


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    shapes = st.sampled_from(SHAPES)
    return tuple(
        Segment(draw(shapes), steps, draw(st.frozensets(st.sampled_from(steps))), draw(st.booleans()))
        for steps in ends_at(draw(st.lists(st.integers(1, 6), max_size=3)))
    )


def compare(drawn: list[Script]) -> None:
    """Losses and parameters to the last bit; with two pipelines sums come in another order."""
    with tempfile.TemporaryDirectory() as folder:
        assert launch(walk, RANKS, args=(drawn, Path(folder))) == 0
        table = json.loads((Path(folder) / "table.json").read_text())
    for script, row in zip(drawn, table, strict=True):
        wide = any(segment.shape[1] > 1 for segment in script)
        if wide:
            assert row["found"] == pytest.approx(row["expected"], rel=1e-12), script
            assert row["parameters"] <= 1e-11, script
        else:
            assert row["found"] == row["expected"] and row["parameters"] == 0, script


@pytest.mark.slow
def test_a_2bw_checkpoint_goes_on_at_another_depth_and_width() -> None:
    compare([EACH_ONCE])


@pytest.mark.slow
@settings(
    max_examples=2,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(scripts(), min_size=4, max_size=4))
def test_drains_saves_and_loads_anywhere_change_nothing(drawn: list[Script]) -> None:
    compare(drawn)
