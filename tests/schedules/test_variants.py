"""What is known of each relative of 1F1B and of each bidirectional schedule: warm-up, what is held, bubble.

Facts: arXiv 2211.05322 (eager), 1806.03377 (PipeDream), 2406.03488 (Seq1F1B), 2107.06925 (Chimera),
2308.15762 (Hanayo), 2503.01328 (GIS in groups), DeepSeek-V3 (DualPipe), BPipe.
"""

from __future__ import annotations

import pytest
from timed import made_for, shape

from pipeloom.ir.action import Action, B, F, I, W
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules import registry

SIZES = [(2, 4), (4, 16), (8, 16), (8, 5)]


def built(name: str, p: int, m: int, chunks: int = 0) -> Schedule:
    stages, placement = registry.default_placement(name, p, chunks)
    return registry.build(name, stages, placement, m)


def warm_up(row: tuple[Action, ...]) -> int:
    """Forwards before the first backward."""
    return next(i for i, a in enumerate(a for a in row if a.kind in (F, B, I)) if a.kind != F)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_eager_1f1b_has_twice_the_warm_up(p: int, m: int) -> None:
    made = built("eager_1f1b", p, m)
    assert [warm_up(row) for row in made.rows] == [min(2 * (p - 1 - r) + 1, m) for r in range(p)]
    assert registry.in_flight(made) == tuple(min(2 * (p - 1 - r) + 1, m) for r in range(p))


def test_eager_1f1b_hides_transfers() -> None:
    """With transfers of half a forward, the steady state of 1F1B waits for both ways of each of them."""
    p, m = 4, 32
    eager, plain = (
        made_for(name, shape(name, p, m, transfer_s=0.5)).outcome.step_s
        for name in ("eager_1f1b", "async_1f1b")
    )
    assert eager == 3 * (m + p - 1) + 2 * (p - 1) * 0.5
    assert plain > eager + m / 2 * 0.5


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_async_1f1b_holds_as_many_micro_batches_as_pipedream_stashes_versions(p: int, m: int) -> None:
    made = built("async_1f1b", p, m)
    assert registry.in_flight(made) == tuple(min(p - r, m) for r in range(p))
    assert made.rows == built("1f1b", p, m).rows
    assert registry.entry("async_1f1b").weights == "stash"


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8)])
def test_seq1f1b_holds_slices_and_its_bubble_is_theirs(p: int, m: int, k: int) -> None:
    """p + k - 1 slices of a k-th; the bubble is that of 1F1B over k."""
    made = built(f"seq1f1b:slices={k}", p, m * k)
    assert registry.in_flight(made) == tuple(min(p - r + k - 1, m * k) for r in range(p))
    name = f"seq1f1b:slices={k}"
    outcome = made_for(name, shape(name, p, m * k, times=(1 / k, 1 / k, 1 / k))).outcome
    assert outcome.step_s == pytest.approx(3 * m + 3 * (p - 1) / k)


def both_ways(name: str, p: int, m: int) -> tuple[float, tuple[float, ...]]:
    """Bubble, with m micro-batches per direction, and what each rank holds, in residuals of a stage."""
    s = shape(name, p, m)
    outcome = made_for(name, s).outcome
    return outcome.step_s - 2 * m * 3.0, tuple(2 * held for held in outcome.peak)


@pytest.mark.parametrize("p", [4, 8])
def test_chimera_holds_two_replicas_and_as_much_on_every_rank(p: int) -> None:
    stages, placement = registry.default_placement("chimera", p)
    assert all(placement.count(rank) == 2 for rank in range(p))
    assert [placement[s] for s in range(p)] == [placement[2 * p - 1 - s] for s in range(p)]
    bubble, held = both_ways("chimera", p, p // 2)
    assert max(held) <= p and min(held) >= p // 2
    assert bubble < 3 * (p - 1)  # of 1F1B


@pytest.mark.parametrize("p", [4, 6, 8])
def test_dualpipe_has_its_published_bubble(p: int) -> None:
    """(p/2 - 1) (F&B + B - 3W), with F&B as long as both: 2 (p/2 - 1) for F = I = W = 1; p + 1 held."""
    bubble, held = both_ways("dualpipe", p, p)
    assert bubble <= 2 * (p // 2 - 1) + 1e-9
    assert max(held) <= p + 1


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipev_has_the_bubble_of_a_dualpipe_on_twice_the_ranks(p: int) -> None:
    s = shape("dualpipev", p, 4 * p)
    outcome = made_for("dualpipev", s).outcome
    assert outcome.step_s - 4 * p * s.period_s <= 2 * (p - 1) + 1e-9
    assert max(outcome.peak) <= p + 0.5


@pytest.mark.parametrize("p", [4, 8])
def test_more_waves_mean_a_smaller_bubble(p: int) -> None:
    bubbles = []
    for chunks in (2, 4):
        s = shape("hanayo", p, 2 * p, chunks)
        outcome = made_for("hanayo", s).outcome
        assert max(outcome.peak) <= p
        bubbles.append((outcome.step_s - s.microbatches * s.period_s) / chunks)
    assert 3 * (p - 1) > bubbles[0] > bubbles[1]


@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("g", [4, 5, 6, 7, 8])
def test_gis_in_groups(g: int, v: int) -> None:
    """Peak g (v - 1) + p stages; bubble at most that of GIS and (p - g)(v - 1)(F + I - W); whole groups."""
    p = 8
    published = (2 * (p - 1) + (p - g) * (v - 1)) / v
    for name in (f"gis_g:group={g},join=1", f"gis_g:group={g}"):
        s = shape(name, p, 4 * g, v)
        outcome = made_for(name, s).outcome
        assert max(outcome.peak) <= (g * (v - 1) + p) / v
        assert (outcome.step_s - s.microbatches * s.period_s) / v <= published + 1e-9


@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("m", [16, 32])
@pytest.mark.parametrize("g", [4, 5, 6, 7, 8])
def test_gis_in_groups_that_do_not_share_the_micro_batches_evenly(g: int, m: int, v: int) -> None:
    """Also then within the peak and the bubble that are published for whole groups."""
    p = 8
    s = shape(f"gis_g:group={g}", p, m, v)
    outcome = made_for("gis_g", s).outcome
    assert max(outcome.peak) <= (g * (v - 1) + p) / v
    bubble = (outcome.step_s - s.microbatches * s.period_s) / v
    assert bubble <= (2 * (p - 1) + (p - g) * (v - 1)) / v + 1e-9


@pytest.mark.parametrize("m", [1, 5, 9, 17])
def test_gis_with_a_few_micro_batches_too_many_or_too_few(m: int) -> None:
    """The rows for whole groups without some micro-batches still run, never longer."""
    whole = 8 * -(-m // 8)
    steps = [made_for("gis", shape("gis:join=1", 8, count, 2)).outcome.step_s for count in (m, whole)]
    assert steps[0] <= steps[1]


def test_gis_refuses_groups_that_would_stall() -> None:
    for group in (3, 9):
        with pytest.raises(ScheduleError, match=f"group {group} for 8 ranks"):
            built(f"gis_g:group={group}", 8, 16)


def test_w_is_right_after_its_i_where_it_is_joined() -> None:
    for row in built("gis_h:join=1", 4, 8).rows:
        kinds = [a for a in row if a.kind != F]
        assert all(
            (a.stage, a.microbatch) == (b.stage, b.microbatch) and (a.kind, b.kind) == (I, W)
            for a, b in zip(kinds[::2], kinds[1::2], strict=True)
        )
