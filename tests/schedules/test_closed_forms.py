"""What is known of bubbles and peaks: closed forms of the published generators, and of relatives of 1F1B.

arXiv 2401.10241 (ZB), 2405.15362 (V), 2503.01328 (PipeOffload, GIS), 2104.04473 (interleaved), 1806.03377
(PipeDream), 2211.05322 (eager), 2406.03488 (Seq1F1B), 2107.06925 (Chimera), 2308.15762 (Hanayo). Bubbles in
micro-batch units of a rank, peaks in micro-batches, for p ranks and v chunks; F = I = W = 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from small import built
from timed import half, made_for, one, shape, third

from pipeloom.ir.action import F
from pipeloom.ir.errors import ScheduleError
from pipeloom.schedules import registry
from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.list_scheduler.engine import ScheduledRecipe


@dataclass(frozen=True)
class Figure:
    """`exact`: ours is the published figure; otherwise ours is at most that, within the published peak."""

    name: str
    chunks: int
    bubble: Callable[[int], float]
    peak: Callable[[int], float]
    exact: bool = True


def by_size(*values: float) -> Callable[[int], float]:
    return dict(zip((4, 8, 16, 32), values, strict=True)).__getitem__


def halves(v: int) -> Callable[[int], float]:
    return lambda p: (2 * (p - 1) + (v - 1) * p / 2) / v


def half_peak(v: int) -> Callable[[int], float]:
    return lambda p: p * (v + 1) / (2 * v)


FIGURES = [
    Figure("eager_1f1b", 1, lambda p: 3 * (p - 1), lambda p: 2 * p - 1),
    Figure("zb_h1", 1, lambda p: p - 1, one),
    Figure("zb_1p", 1, lambda p: p - 1, one),
    Figure("zb_2p", 1, lambda p: p - 1, lambda p: 2 * p),
    Figure("zb_v", 2, lambda p: (p - 1) / 2, one),
    Figure("v_half", 2, lambda p: 1.5 * p - 3.5, half),
    Figure("v_min", 2, by_size(5.5, 13.5, 29.5, 61.5), third),
    Figure("1f1b_v", 2, by_size(7.5, 16.5, 37.5, 76.5), lambda p: -(-2 * p // 3), exact=False),
    Figure("po", 2, by_size(4.5, 11.5, 25.5, 53.5), by_size(3.5, 6.5, 12.5, 24.5), exact=False),
    Figure("po", 4, by_size(4.5, 10.25, 23.25, 49.25), by_size(2.75, 5.75, 10.75, 20.75), exact=False),
]
for v in (2, 4):
    FIGURES += [
        Figure("interleaved_1f1b", v, lambda p, v=v: 3 * (p - 1) / v, lambda p, v=v: p + (p - 1) / v),
        Figure("gis:join=1", v, lambda p, v=v: 2 * (p - 1) / v, one),
        Figure("gis_h:join=1", v, halves(v), half_peak(v)),
        Figure("gis", v, lambda p, v=v: (p - 1) / v, one),
        Figure("gis_h", v, halves(v), half_peak(v), exact=False),
    ]


SIZES = [
    pytest.param(p, k * p, marks=[pytest.mark.slow] if p > 8 else []) for p in (4, 8, 16, 32) for k in (2, 4)
]


def bubble(made: ScheduledRecipe, s: Shape) -> float:
    return (made.step_s - s.microbatches * s.period_s) / s.chunks


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{f.name}-v{f.chunks}")
def test_bubble_and_peak(figure: Figure, p: int, m: int) -> None:
    s = shape(figure.name, p, m, figure.chunks)
    made = made_for(figure.name, s)
    assert max(made.peak) <= figure.peak(p) + 1e-9
    assert bubble(made, s) <= figure.bubble(p) + 1e-9
    assert not figure.exact or bubble(made, s) == pytest.approx(figure.bubble(p), abs=1e-9)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["zb_2p", "zb_v"])
def test_no_rank_idles_between_its_first_and_last_action(name: str, p: int, m: int) -> None:
    """The other definition of a bubble, for optimizers that are validated afterwards."""
    s = shape(name, p, m)
    assert made_for(name, s).span_s == pytest.approx(m * s.period_s, abs=1e-9)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 16), (8, 16), (8, 5)])
def test_what_relatives_of_1f1b_hold(p: int, m: int) -> None:
    """As many micro-batches as PipeDream stashes versions; and twice as many before the first backward."""
    plain, eager = built("async_1f1b", p, m), built("eager_1f1b", p, m)
    assert registry.in_flight(plain) == tuple(min(p - r, m) for r in range(p))
    assert plain.rows == built("1f1b", p, m).rows and registry.entry("async_1f1b").weights == "stash"
    warm_up = [next(i for i, a in enumerate(row) if a.kind != F) for row in eager.rows]
    assert warm_up == list(registry.in_flight(eager)) == [min(2 * (p - 1 - r) + 1, m) for r in range(p)]


def test_eager_1f1b_hides_transfers() -> None:
    """With transfers of half a forward, the steady state of 1F1B waits for both ways of each of them."""
    p, m = 4, 32
    eager, plain = (
        made_for(name, shape(name, p, m, transfer_s=0.5)).step_s for name in ("eager_1f1b", "async_1f1b")
    )
    assert eager == 3 * (m + p - 1) + 2 * (p - 1) * 0.5
    assert plain > eager + m / 2 * 0.5


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8)])
def test_seq1f1b_holds_slices_and_its_bubble_is_theirs(p: int, m: int, k: int) -> None:
    """p + k - 1 slices of a k-th; the bubble is that of 1F1B over k."""
    name = f"seq1f1b:slices={k}"
    assert registry.in_flight(built(name, p, m * k)) == tuple(min(p - r + k - 1, m * k) for r in range(p))
    outcome = made_for(name, shape(name, p, m * k, times=(1 / k, 1 / k, 1 / k)))
    assert outcome.step_s == pytest.approx(3 * m + 3 * (p - 1) / k)


@pytest.mark.parametrize("p", [4, 8])
def test_chimera_holds_two_replicas_and_as_much_on_every_rank(p: int) -> None:
    _, placement = registry.default_placement("chimera", p)
    assert all(placement.count(rank) == 2 for rank in range(p))
    assert placement[:p] == placement[p:][::-1]
    outcome = made_for("chimera", shape("chimera", p, p // 2))
    assert max(outcome.peak) <= p / 2 and min(outcome.peak) >= p // 2 / 2
    assert outcome.step_s - p * 3 < 3 * (p - 1)  # of 1F1B


@pytest.mark.parametrize("p", [4, 8])
def test_more_waves_mean_a_smaller_bubble(p: int) -> None:
    bubbles = [3.0 * (p - 1)]
    for chunks in (2, 4):
        s = shape("hanayo", p, 2 * p, chunks)
        made = made_for("hanayo", s)
        assert max(made.peak) <= p and bubble(made, s) < bubbles[-1]
        bubbles.append(bubble(made, s))


@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("g", [4, 5, 6, 7, 8])
def test_gis_in_groups(g: int, v: int) -> None:
    """Peak g (v - 1) + p stages; bubble at most that of GIS and (p - g)(v - 1)(F + I - W): published for
    whole groups, kept where groups do not share the micro-batches evenly, too."""
    p, name = 8, f"gis_g:group={g}"
    for how, m in ((f"{name},join=1", 4 * g), (name, 4 * g), (name, 16), (name, 32)):
        s = shape(how, p, m, v)
        made = made_for(how, s)
        assert max(made.peak) <= (g * (v - 1) + p) / v
        assert bubble(made, s) <= (2 * (p - 1) + (p - g) * (v - 1)) / v + 1e-9


@pytest.mark.parametrize("group", [3, 9])
def test_gis_refuses_groups_that_would_stall(group: int) -> None:
    with pytest.raises(ScheduleError, match=f"group {group} for 8 ranks"):
        built(f"gis_g:group={group}", 8, 16)
