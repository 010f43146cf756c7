"""A cap that needs more copying than hides behind computing costs time; it is not refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import runs
from deep import ROWS, TANH

from pipeloom import plan
from pipeloom.ir.cluster import Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.units import parse_bytes


def test_a_slow_link_costs_time_and_the_smallest_cap_that_is_named_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Link(bandwidth_bytes_per_s=1e6)  # a copy takes far longer than a forward
    monkeypatch.setattr("pipeloom.profiler.file_tier", lambda directory: (slow, slow, []))
    captured = runs.capture_of(TANH, ROWS)
    make = partial(
        plan, TANH, stages=2, microbatches=8, microbatch_size=ROWS, schedule="gpipe", captured=captured
    )
    free = make()
    away = partial(make, offload_dir=tmp_path, treatments=("offload",))
    capped = away(memory=round(0.6 * max(free.peaks)))
    assert all(peak <= cap for peak, cap in zip(capped.peaks, capped.caps, strict=True))
    assert capped.predicted_step_s > 2 * free.predicted_step_s
    with pytest.raises(InfeasibleError) as caught:
        away(memory=round(0.2 * max(free.peaks)))
    named = re.search(r"at least ([0-9.]+ [KM]iB)", str(caught.value.hint))
    assert named is not None
    least = away(memory=parse_bytes(named[1].replace(" ", "")))
    assert all(peak <= cap for peak, cap in zip(least.peaks, least.caps, strict=True))
