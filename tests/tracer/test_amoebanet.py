"""AmoebaNet-D of the benchmarks: its published sizes, and cells cut in the middle."""

from __future__ import annotations

import pytest
import runs
import torch
import zoo
from dawnpiper import AmoebaNetD, amoeba

from pipeloom import verify


@pytest.mark.parametrize(("filters", "millions"), [(208, 82), (416, 318), (544, 542)])
def test_has_the_published_number_of_parameters(filters: int, millions: int) -> None:
    with torch.device("meta"):
        model = AmoebaNetD(18, filters)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.slow
def test_trains_cut_between_any_ops() -> None:
    job = zoo.in_double(amoeba(3, 16, 64, classes=10))
    result = verify(job, runs.even_plan(job, 3, schedule="1f1b", microbatches=3, split=False))
    assert result.passed, result
