"""Bubbles and peaks of the published generators: arXiv 2401.10241, 2405.15362, 2503.01328, 2104.04473.

Bubble times in micro-batch units of a rank (F = I = W = 1), peaks in micro-batches, for p ranks and v chunks.
`exact`: ours is the published figure; otherwise ours is at most that, within the published peak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from timed import made_for, shape


@dataclass(frozen=True)
class Figure:
    name: str
    chunks: int
    bubble: Callable[[int], float]
    peak: Callable[[int], float]
    exact: bool = True


def table(*values: float) -> Callable[[int], float]:
    return dict(zip((4, 8, 16, 32), values, strict=True)).__getitem__


FIGURES = [
    Figure("eager_1f1b", 1, lambda p: 3 * (p - 1), lambda p: 2 * p - 1),
    Figure("zb_h1", 1, lambda p: p - 1, lambda p: p),
    Figure("zb_1p", 1, lambda p: p - 1, lambda p: p),
    Figure("zb_2p", 1, lambda p: p - 1, lambda p: 2 * p),
    Figure("zb_v", 2, lambda p: (p - 1) / 2, lambda p: p),
    Figure("v_half", 2, lambda p: 1.5 * p - 3.5, lambda p: p // 2 + 1),
    Figure("v_min", 2, table(5.5, 13.5, 29.5, 61.5), lambda p: (p + 4) // 3),
    Figure("1f1b_v", 2, table(7.5, 16.5, 37.5, 76.5), lambda p: -(-2 * p // 3), exact=False),
    *(
        figure
        for v in (2, 4)
        for figure in (
            Figure("interleaved_1f1b", v, lambda p, v=v: 3 * (p - 1) / v, lambda p, v=v: p + (p - 1) / v),
            Figure("gis:join=1", v, lambda p, v=v: 2 * (p - 1) / v, lambda p: p),
            Figure(
                "gis_h:join=1",
                v,
                lambda p, v=v: (2 * (p - 1) + (v - 1) * p / 2) / v,
                lambda p, v=v: p * (v + 1) / (2 * v),
            ),
            Figure("gis", v, lambda p, v=v: (p - 1) / v, lambda p: p),
            Figure(
                "gis_h",
                v,
                lambda p, v=v: (2 * (p - 1) + (v - 1) * p / 2) / v,
                lambda p, v=v: p * (v + 1) / (2 * v),
                exact=False,
            ),
        )
    ),
    Figure("po", 2, table(4.5, 11.5, 25.5, 53.5), table(3.5, 6.5, 12.5, 24.5), exact=False),
    Figure("po", 4, table(4.5, 10.25, 23.25, 49.25), table(2.75, 5.75, 10.75, 20.75), exact=False),
]

SIZES = [
    pytest.param(p, k * p, marks=[pytest.mark.slow] if p > 8 else []) for p in (4, 8, 16, 32) for k in (2, 4)
]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{f.name}-v{f.chunks}")
def test_bubble_and_peak(figure: Figure, p: int, m: int) -> None:
    s = shape(figure.name, p, m, figure.chunks)
    made = made_for(figure.name, s).outcome
    bubble = (made.step_s - 3.0 * m * figure.chunks) / figure.chunks
    assert max(made.peak) <= figure.peak(p) + 1e-9
    if figure.exact:
        assert bubble == pytest.approx(figure.bubble(p), abs=1e-9)
    else:
        assert bubble <= figure.bubble(p) + 1e-9


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["zb_2p", "zb_v"])
def test_no_rank_idles_between_its_first_and_last_action(name: str, p: int, m: int) -> None:
    """The other definition of a bubble, for optimizers that are validated afterwards."""
    s = shape(name, p, m)
    assert made_for(name, s).outcome.span_s == pytest.approx(m * s.period_s, abs=1e-9)
